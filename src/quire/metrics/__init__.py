"""What Quire measures of itself."""
