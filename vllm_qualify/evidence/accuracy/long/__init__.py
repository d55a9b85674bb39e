"""Questions about long texts, as long as the server's tokenizer says: what a model still finds in them, by RULER's rule."""
