"""Model families: for each, a table of mapping objects between training and Hugging Face names."""
