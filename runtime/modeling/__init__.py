"""What models need around attention."""
