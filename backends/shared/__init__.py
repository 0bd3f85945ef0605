"""What backends share: HTTP, checks of replies, failures, launched servers, weights. It knows no server's API."""
