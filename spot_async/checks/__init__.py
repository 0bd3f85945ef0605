"""Whether a run can work: what is looked at before anything starts, and what its services are asked once they run."""
