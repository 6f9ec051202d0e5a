"""Parts of `kdist tune`: one module for each question that it answers, and its trials."""
