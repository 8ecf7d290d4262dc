"""Which recipe to take for what one trains: ``nmrun help recipe`` begins with it, and the page
which-recipe.md has it as a table.

It follows from the committed comparisons, so a change there changes it here.
"""

from __future__ import annotations

# For every task that no comparison has, in Markdown; links are relative to docs/.
BEGIN_WITH = (
    "From scratch take [S-STE](recipes/s_ste.md), in fine-tuning [SR-STE](recipes/sr_ste.md), "
    "unless your task is in the picture or below."
)
# What one trains, and what to take.
ADVICE = (
    (
        "images from scratch",
        "under Adam [SdGf](recipes/sdgf.md) (`sdgf_stepwise`); under SGD SR-STE up to 1:4, then SdGf",
    ),
    (
        "text from scratch",
        "a language model: S-STE, with a tuned learning rate. Translation: [MdGf](recipes/mdgf.md) "
        "(`mdgf_exponential`), or S-STE for far fewer multiplications",
    ),
    (
        "a pretrained encoder, fine-tuned",
        "[ASP](recipes/asp.md) at 2:4, the simplest; SR-STE or [STE](recipes/ste.md) from 1:4 on",
    ),
    (
        "a trained language model, to be pruned",
        "[SparseGPT](pruning.md), then [ASP with a dense teacher](results/retraining.md); "
        "[AST](recipes/ast.md) at 1:4",
    ),
    (
        "with nothing tuned",
        "images under Adam: [STEP](recipes/step.md) with `recipe.switch=0.5`. [A language "
        "model](results/step.md#short-runs-with-nothing-tuned): that STEP up to 1:4, S-STE at 1:16",
    ),
    (
        "for thousands of steps",
        "[images](results/step.md): STEP with `recipe.switch=0.5`, or SR-STE for fewer "
        "multiplications. Text: S-STE",
    ),
)
