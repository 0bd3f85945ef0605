"""`spot-async inspect` and `report`: show what a run saw and where its time went. They only read its files."""
