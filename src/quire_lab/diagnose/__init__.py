"""What limits a running server, from what it says over HTTP: `read` it, compute `figures`, apply the `rules`."""
