"""What helps inside models: batch norm, tables with sparse gradients."""
