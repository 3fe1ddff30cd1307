"""What leaves the program: exported files, reports, pictures."""
