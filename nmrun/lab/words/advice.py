"""Which recipe to take for what one trains: ``nmrun help recipe`` begins with it, and the page
which-recipe.md has it as a table.

It follows from the committed comparisons, so a change there changes it here.
"""

from __future__ import annotations

# For every task that no comparison has, in Markdown; links are relative to docs/.
BEGIN_WITH = (
    "Begin with [SR-STE](recipes/sr_ste.md), the default. From scratch at 1:8 and sparser, "
    "[S-STE](recipes/s_ste.md) leads it in every comparison. In "
    "[fine-tuning](results/finetuning.md) at 1:16 S-STE is far behind."
)
# What one trains, and what to take.
ADVICE = (
    (
        "images from scratch",
        "under Adam [SdGf](recipes/sdgf.md) (`sdgf_stepwise`). Under SGD SR-STE up to 1:4, then SdGf. "
        "SR-STE takes fewer multiplications",
    ),
    (
        "text from scratch",
        "a language model: S-STE, whose [learning rate you should "
        "tune](results/language_as_they_come.md#what-tuning-is-worth). Translation: "
        "[MdGf](recipes/mdgf.md) (`mdgf_exponential`), or S-STE for far fewer multiplications",
    ),
    (
        "a pretrained encoder, fine-tuned",
        "[ASP](recipes/asp.md) at 2:4, the simplest; SR-STE or [STE](recipes/ste.md) from 1:4 on",
    ),
    (
        "a trained language model, to be pruned",
        "[SparseGPT](pruning.md), then ASP for [a tenth of the original "
        "steps](results/retraining.md) with a [dense teacher](training.md#a-dense-teacher); "
        "[AST](recipes/ast.md) at 1:4",
    ),
    (
        "with nothing tuned",
        "images under Adam: [STEP](recipes/step.md) with `recipe.switch=0.5`, if half of the run "
        "may be [dense](#step-without-tuning). [A language "
        "model](results/language_as_they_come.md): that STEP up to 1:4, S-STE at 1:16",
    ),
    (
        "for thousands of steps",
        "[images](results/step_long.md): STEP with `recipe.switch=0.5`, or SR-STE for fewer "
        "multiplications; SdGf, MdGf and S-STE were not tried. "
        "[Text](results/step_long.md#a-language-model): S-STE (exploratory), then SR-STE",
    ),
)
