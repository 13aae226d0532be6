"""What quality costs: perplexity of texts, and how far two ways to run a model are apart."""
