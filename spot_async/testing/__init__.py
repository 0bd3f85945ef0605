"""Virtual time and simulated services, for our tests and for those of your own policies and backends."""
