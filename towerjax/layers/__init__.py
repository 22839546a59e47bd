"""Parts of models: batch norm over towers, and tables with sparse gradients."""
