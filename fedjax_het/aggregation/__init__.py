"""What the server does with what clients send."""
