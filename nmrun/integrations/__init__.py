"""nmrun in other people's training stacks: each a thin file over ``nmrun.sparsify``."""
