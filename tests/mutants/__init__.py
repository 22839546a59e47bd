"""Which seeded bugs does the suite find? See README.md."""
