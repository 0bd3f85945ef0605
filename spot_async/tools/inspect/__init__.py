"""`spot-async inspect` and `report`: what a run saw, sample by sample, and where its time went."""
