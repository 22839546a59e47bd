"""What one looks at a step with: its audit, its report, its places."""
