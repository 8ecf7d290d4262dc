"""Which recipe to take for what one trains: ``nmrun help recipe`` begins with it, and the page
which-recipe.md has it as a table.

It follows from the committed comparisons, so a change there changes it here.
"""

from __future__ import annotations

# What one trains, and what to take, in Markdown; links are relative to docs/.
ADVICE = (
    (
        "images from scratch, Adam",
        "[SdGf](recipes/sdgf.md) (`sdgf_stepwise`). [SR-STE](recipes/sr_ste.md) and [STE](recipes/ste.md) "
        "take fewer FLOPs and lose a point of accuracy at 2:4",
    ),
    (
        "images from scratch, SGD",
        "SR-STE at 2:4, SR-STE or SdGf at 1:4, SdGf at 1:8 and 1:16. At 1:8 [S-STE](recipes/s_ste.md) "
        "is not told apart from SdGf, for fewer FLOPs",
    ),
    (
        "text from scratch",
        "a language model: S-STE. [Tune its learning rate](results/language_as_they_come.md#what-tuning-is-worth); "
        "there is nothing else to tune. Translation: [MdGf](recipes/mdgf.md) (`mdgf_exponential`), which takes "
        "nearly the FLOPs of dense training; S-STE for fewer",
    ),
    (
        "a pretrained encoder, fine-tuned",
        "[ASP](recipes/asp.md) at 2:4, the simplest; SR-STE or STE from 1:4 on",
    ),
    (
        "a trained language model, to be pruned",
        "[SparseGPT](pruning.md), then ASP for [a tenth of the original "
        "steps](results/retraining.md) with a [dense teacher](training.md#a-dense-teacher); "
        "[AST](recipes/ast.md) at 1:4. To start from the dense weights: [CAST](recipes/cast.md)",
    ),
    (
        "at 1:16",
        "SdGf on images, S-STE on text, MdGf in translation; not ASP in fine-tuning",
    ),
    (
        "with nothing tuned",
        "images, Adam: [STEP](recipes/step.md) with `recipe.switch=0.5`, if half of the run may be "
        "[dense](#step-without-tuning); for fewer FLOPs SR-STE at 2:4 and 1:4, S-STE at 1:8 and 1:16. "
        "[Language models](results/language_as_they_come.md): that STEP at 2:4 and 1:4, S-STE at 1:16, either at 1:8",
    ),
    (
        "for thousands of steps",
        "[images](results/step_long.md): STEP with `recipe.switch=0.5`, or SR-STE for as many FLOPs. "
        "[Text](results/step_long.md#a-language-model): S-STE (exploratory), SR-STE. "
        "The other lines come from 98 to 1,215 steps",
    ),
    (
        "with fast steps",
        "S-STE or SR-STE. Their weights are N:M from the first step, so [N:M "
        "products](acceleration.md) work in every step",
    ),
    (
        "anything else",
        "SR-STE, the default of `nmrun.sparsify`: it works with every option. From scratch at 1:8 "
        "and 1:16 S-STE leads it, tuned or not. In [fine-tuning](results/finetuning.md) at 1:16 "
        "S-STE falls behind",
    ),
)
