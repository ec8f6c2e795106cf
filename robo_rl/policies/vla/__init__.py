"""Vision-language-action models in plain torch, trained by the same methods as the small policies."""
