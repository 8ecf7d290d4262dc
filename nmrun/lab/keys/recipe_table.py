"""What the classes of ``nmrun.recipes`` say. Written by docs/generate.py."""

# ruff: noqa
# fmt: off
from nmrun import ranges
from nmrun.lab.keys.fields import Field, RecipeFacts

TABLE = {
    'nmrun.recipes.dense.Dense': RecipeFacts(
        title='dense',
        takes_blocks=False,
        about='No weight is made sparse; ``nmrun.sparsify`` returns a handle that does nothing.\n\nWhen to use: as the row that every table is compared with.',
        module='Dense training: the reference that every recipe is compared with.',
        keys={
        },
    ),
    'nmrun.recipes.asp.ASP': RecipeFacts(
        title='ASP',
        takes_blocks=True,
        about='Dense training, one pruning by magnitude, then training with the mask fixed.\n\nWhen to use: fine-tuning a trained network at 2:4, as the simplest recipe. Retraining a\nlanguage model that SparseGPT pruned, with a dense teacher. Not in fine-tuning at 1:16.\n\nArgs:\n    prune_at: the fraction of all steps that is trained densely first.\n    permute: before pruning, reorder channels so that the masks keep more\n        (:mod:`nmrun.permutation.permute`). Copies of the model (EMA) are then made after it.',
        module="ASP: train dense, prune once by magnitude, train on with the mask fixed (Mishra et al. 2021,\narXiv 2104.08378, and NVIDIA's apex).\n\nApex prunes a trained network and repeats the whole training. Here one run holds both: ``prune_at``\nof the steps are dense, the rest train with the fixed mask, and all recipes get the same number of\nsteps. The optimizer keeps its state, and the learning rate its schedule (on the command line\n``schedule.cycles=2`` begins it anew). ``prune_at=0`` prunes at once, for a model that comes\ntrained. Pruned weights are 0 after every step, as in apex.\n\nCost: one mask byte a weight, one pass for the masked copy, one for the gradient, one for the zeros.",
        keys={
            'prune_at': Field(0.5, ranges.FRACTION, ranges.between(0.0, 0.8), meaning='the fraction of all steps that is trained densely first.'),
            'permute': Field(False, ranges.FLAG, None, meaning='before pruning, reorder channels so that the masks keep more (:mod:`nmrun.permutation.permute`). Copies of the model (EMA) are then made after it.'),
        },
    ),
    'nmrun.recipes.ste.STE': RecipeFacts(
        title='STE',
        takes_blocks=True,
        about='The N largest weights of every M, anew at every step; all weights get the gradient.\n\nWhen to use: fine-tuning a trained network from 1:4 on, like SR-STE, and as the reference for\nwhat a decay or a dense start adds. It has nothing to tune but the learning rate.',
        module='STE: the hard N:M mask with the plain straight-through estimator, chosen anew at every step.\n\nForward ``m * w`` with m the N largest magnitudes of M; the gradient reaches every dense weight,\nalso the pruned ones, unchanged (Bengio et al. 2013; the baseline of Zhou et al. 2021, arXiv\n2102.04010).\n\nCost: one projection a step, one dense copy of the sparse weights.',
        keys={
        },
    ),
    'nmrun.recipes.ste.PeriodicSTE': RecipeFacts(
        title='STE, periodic',
        takes_blocks=True,
        about='STE with a mask that stays for some steps.\n\nWhen to use: reinforcement learning, as in its paper, and where masks that change at every step\ndisturb. One small task was tried, which decides nothing.\n\nThat is the row-wise N:M training of reinforcement learning (RNM-TD3, Vrce et al. 2026, arXiv\n2602.14578): a gradient for the kept weights only.\n\nArgs:\n    interval: optimizer steps that a mask stays.\n    gradient: ``"masked"`` for the kept weights alone, or ``"ste"`` for all.',
        module='STE: the hard N:M mask with the plain straight-through estimator, chosen anew at every step.\n\nForward ``m * w`` with m the N largest magnitudes of M; the gradient reaches every dense weight,\nalso the pruned ones, unchanged (Bengio et al. 2013; the baseline of Zhou et al. 2021, arXiv\n2102.04010).\n\nCost: one projection a step, one dense copy of the sparse weights.',
        keys={
            'interval': Field(100, ranges.whole(1), None, meaning='optimizer steps that a mask stays.'),
            'gradient': Field('masked', ranges.one_of('ste', 'masked'), None, meaning='``"masked"`` for the kept weights alone, or ``"ste"`` for all.'),
        },
    ),
    'nmrun.recipes.sr_ste.SRSTE': RecipeFacts(
        title='SR-STE',
        takes_blocks=True,
        about="STE with a decay of the pruned weights.\n\nWhen to use: images from scratch under SGD at 2:4 and 1:4, and fine-tuning from 1:4 on.\nUnder Adam tune ``decay``. Its default is the paper's, made for SGD: it does next to nothing in a\nthousand steps of Adam, and helps in longer runs on text. The best value differs by task.\n\nArgs:\n    decay: the decay of pruned weights; the paper's lambda_w, 2e-4 there too. Ordinary weight decay acts\n        besides, on all weights.",
        module="SR-STE: straight-through with a decay of the pruned weights (Zhou et al. 2021, arXiv 2102.04010).\n\nThe forward pass uses ``m * w``. The gradient becomes ``g + decay * (1 - m) * w``, which pulls pruned\nweights to zero and so calms the mask. The term is added once per optimizer step, to the unscaled and\nclipped gradient. The official code adds it inside autograd: once per\nmicro-batch, divided by the fp16 loss scale and clipped along with the gradient.\n\nCost: STE's, and one pass over the sparse weights.",
        keys={
            'decay': Field(0.0002, ranges.number(0), ranges.log(1e-06, 0.01), meaning="the decay of pruned weights; the paper's lambda_w, 2e-4 there too. Ordinary weight decay acts besides, on all weights."),
        },
    ),
    'nmrun.recipes.step.STEP': RecipeFacts(
        title='STEP',
        takes_blocks=True,
        about="Dense training under Adam, then STE with Adam's second moment frozen.\n\nWhen to use: images under Adam, with ``switch=0.5``, where nothing can be tuned and the number of\nsteps is given. With as many multiplications SR-STE catches up or leads. Where every recipe is tuned\nothers lead, on text by far. In long runs on text it needs SR-STE's decay, ``decay=2e-4``.\n\nArgs:\n    switch: when phase two, that of masks, begins: after a fraction of all steps, or by a rule:\n        ``auto`` (AutoSwitch), ``auto_geometric``, ``variance_ratio`` or ``gradient_norm``\n        (:mod:`nmrun.recipes.switch`).\n    t_min: the fraction of all steps before which no rule switches.\n    t_max: the fraction of all steps after which a rule switches in any case.\n    window: whether AutoSwitch waits until its window of 1 / (1 - beta2) steps is ``full``, or\n        takes the samples that there are (``partial``).\n    threshold: AutoSwitch's threshold, over the change of the second moment that steady\n        gradients make: above 1, such as 1.2. By default it is Adam's eps, as in the paper.\n    eps_mode: the denominator of the frozen second moment v: ``inside`` is sqrt(v + eps),\n        ``outside`` Adam's sqrt(v) + eps, ``floor`` sqrt(v) + eps^(3/4).\n    bias_correction: whether the frozen second moment is bias-corrected.\n    second_moment: ``frozen`` at the switch, or ``live``: phase two is then STE after a dense start,\n        which shows what the freezing is worth.\n    decay: the decay of pruned weights in phase two, as SR-STE's (the paper: 0).\n    lr_factor: factor of the learning rates in phase two (the paper: 1). Phase two often trains\n        best at more than the dense phase stands.",
        module="STEP: learn N:M masks with Adam from a precondition (Lu et al. 2023, arXiv 2302.01172).\n\nPhase one is ordinary dense Adam. At the switch its second moment v is frozen. Phase two learns the\nmask with STE, divides by the frozen preconditioner, and leaves all other parameters on live Adam.\nThe switch is found by a rule (:mod:`nmrun.recipes.switch`; the paper's is AutoSwitch, algorithm 2)\nor fixed beforehand.\n\nCost: phase one is dense plus one pass over the sparse weights for the rule's sample; phase two is\nSTE's, and v needs no update.",
        keys={
            'switch': Field('auto', ranges.SWITCH, ranges.among('auto', 0.1, 0.2, 0.3, 0.5, 0.7), meaning='when phase two, that of masks, begins: after a fraction of all steps, or by a rule: ``auto`` (AutoSwitch), ``auto_geometric``, ``variance_ratio`` or ``gradient_norm`` (:mod:`nmrun.recipes.switch`).'),
            't_min': Field(0.1, ranges.number(0, 1), None, meaning='the fraction of all steps before which no rule switches.'),
            't_max': Field(0.5, ranges.number(0, 1), None, meaning='the fraction of all steps after which a rule switches in any case.'),
            'window': Field('full', ranges.one_of('full', 'partial'), None, meaning='whether AutoSwitch waits until its window of 1 / (1 - beta2) steps is ``full``, or takes the samples that there are (``partial``).'),
            'threshold': Field(None, ranges.number(0, open_low=True, optional=True), None, meaning="AutoSwitch's threshold, over the change of the second moment that steady gradients make: above 1, such as 1.2. By default it is Adam's eps, as in the paper."),
            'eps_mode': Field('inside', ranges.one_of('inside', 'outside', 'floor'), None, meaning="the denominator of the frozen second moment v: ``inside`` is sqrt(v + eps), ``outside`` Adam's sqrt(v) + eps, ``floor`` sqrt(v) + eps^(3/4)."),
            'bias_correction': Field(True, ranges.FLAG, None, meaning='whether the frozen second moment is bias-corrected.'),
            'second_moment': Field('frozen', ranges.one_of('frozen', 'live'), None, meaning='``frozen`` at the switch, or ``live``: phase two is then STE after a dense start, which shows what the freezing is worth.'),
            'decay': Field(0.0, ranges.number(0), None, meaning="the decay of pruned weights in phase two, as SR-STE's (the paper: 0)."),
            'lr_factor': Field(1.0, ranges.number(0, open_low=True), None, meaning='factor of the learning rates in phase two (the paper: 1). Phase two often trains best at more than the dense phase stands.'),
        },
    ),
    'nmrun.recipes.s_ste.SSTE': RecipeFacts(
        title='S-STE',
        takes_blocks=False,
        about="STE with a soft threshold, times a scale that is kept with each weight.\n\nWhen to use: a language model from scratch, and where nothing but the learning rate can be\ntuned. Not in fine-tuning at 1:16.\n\nArgs:\n    gamma: where the threshold lies between the (N+1)-th largest magnitude (0) and the N-th (1)\n        of a group (the paper's table 1 varies a gamma; that it is this one is our reading).\n        Only 0 has a kernel of its own.\n    fit: how the scale is fitted to the weights: ``mse``, nearest in the mean square, or\n        ``l1``, with the same sum of magnitudes (table 2).\n    beta: one scale for all weights, in place of fitted ones; 1 is none (table 2, figure 4a).\n    interval: steps between fits of the scale (figures 4b and 4c). By default there is one fit,\n        to the initial weights.",
        module="S-STE: continuous pruning by a soft threshold with a frozen scale (arXiv 2409.09099).\n\nAfter Hu et al. 2024. The forward pass uses ``beta * S(w)``: S shrinks every magnitude by the\ngroup's (N+1)-th largest one, which makes the sparse weight a continuous function of the dense one.\nbeta is fitted to the initial weights by least squares and never changed; it restores the lost norm.\nThe gradient of ``beta * S(w)`` reaches w unchanged: neither multiplied by beta nor masked.\n\nCost: STE's. The hyperparameters are the paper's ablations, which its defaults won. The paper's FP8\nand gradient estimators are options of ``nmrun.sparsify``, not of this recipe.",
        keys={
            'gamma': Field(0.0, ranges.number(0, 1, open_high=True), None, meaning="where the threshold lies between the (N+1)-th largest magnitude (0) and the N-th (1) of a group (the paper's table 1 varies a gamma; that it is this one is our reading). Only 0 has a kernel of its own."),
            'fit': Field('mse', ranges.one_of('mse', 'l1'), None, meaning='how the scale is fitted to the weights: ``mse``, nearest in the mean square, or ``l1``, with the same sum of magnitudes (table 2).'),
            'beta': Field(None, ranges.number(0, open_low=True, optional=True), None, meaning='one scale for all weights, in place of fitted ones; 1 is none (table 2, figure 4a).'),
            'interval': Field(None, ranges.whole(1, optional=True), None, meaning='steps between fits of the scale (figures 4b and 4c). By default there is one fit, to the initial weights.'),
        },
    ),
    'nmrun.recipes.bi_mask.BiMask': RecipeFacts(
        title='Bi-Mask',
        takes_blocks=False,
        about="SR-STE with a second mask for the input gradient.\n\nWhen to use: where the product that gives the input gradient has to be sparse too. It was\ncompared on the digits alone.\n\nArgs:\n    decay: the decay of pruned weights, as SR-STE's.\n    interval: optimizer steps between searches for a permutation.\n    candidates: permutations that a search draws, other ones for each seed.\n\nGrouped convolutions and what ``layer.install`` leaves alone keep the exact input gradient.",
        module="Bi-Mask: a second mask makes the input gradient N:M as well (Zhang et al. 2023, arXiv\n2302.06058).\n\nForward and weight gradient are SR-STE's. The input gradient ``dX = dZ W`` sums over the outputs, so\nthere the forward weight is pruned once more, to N:M along the outputs. Which outputs share a group\nis free: every ``interval`` steps the best of ``candidates`` random permutations is taken, the one\nthat loses fewest entries. Between, the mask alone follows the weight. 100 and 100 are the paper's;\nits code for CNNs draws 10 unless told otherwise, and that for DeiT counts forward passes.\n\nCost: SR-STE's, and a mask a step.",
        keys={
            'decay': Field(0.0002, ranges.number(0), ranges.log(1e-06, 0.01), meaning="the decay of pruned weights, as SR-STE's."),
            'interval': Field(100, ranges.whole(1), None, meaning='optimizer steps between searches for a permutation.'),
            'candidates': Field(100, ranges.whole(1), None, meaning='permutations that a search draws, other ones for each seed.'),
        },
    ),
    'nmrun.recipes.t_sr_ste.TSRSTE': RecipeFacts(
        title='T-SR-STE',
        takes_blocks=False,
        about="SR-STE with masks that are N:M along inputs and outputs, and stay for some steps.\n\nWhen to use: pre-training where the forward and the backward product should both be fast. In a\nlanguage model at 2:4 it is behind SR-STE; else it was compared on the digits alone.\n\nArgs:\n    decay: the decay of pruned weights, the paper's lambda_W. Its scripts have 6e-6 (BERT), 6e-5 to 2e-4\n        (GPT-2), 6e-3 (DeiT).\n    interval: optimizer steps that a mask stays (the authors' DeiT: 10).\n    dense_end: the fraction of all steps at the end that is dense.",
        module="T-SR-STE: transposable masks with masked decay on the gradient (Hu et al. 2024, arXiv\n2404.01847).\n\nEvery M x M block of a weight keeps N in each row and each column: the forward product and the one\nfor the input's gradient both have an N:M operand. The mask stays for ``interval`` steps; the\ngradient becomes ``g + decay * (1 - m) * w`` once per optimizer step. The paper ends with a sixth of\nthe training dense (``dense_end=0.1667``), and then its network is dense too. By default it is 0\nhere, so that every recipe's result is N:M.\n\nCost: the exact mask search every ``interval`` steps, else SR-STE's.",
        keys={
            'interval': Field(40, ranges.whole(1), None, meaning="optimizer steps that a mask stays (the authors' DeiT: 10)."),
            'decay': Field(0.0002, ranges.number(0), ranges.log(1e-06, 0.01), meaning="the decay of pruned weights, the paper's lambda_W. Its scripts have 6e-6 (BERT), 6e-5 to 2e-4 (GPT-2), 6e-3 (DeiT)."),
            'dense_end': Field(0.0, ranges.FRACTION, None, meaning='the fraction of all steps at the end that is dense.'),
        },
    ),
    'nmrun.recipes.gradient_flow.MdGfLinear': RecipeFacts(
        title='MdGf-Linear',
        takes_blocks=False,
        about='Pruned weights fade linearly, ``D(j) = max(0, 1 - tau j)``.\n\nWhen to use: to compare with ``mdgf_exponential``. It was itself compared on the digits alone.\n\nArgs:\n    tau: how fast D falls, per step. By default the fall takes the phase between ``dense`` and ``final``.\n    grad_mode: the gradient of pruned weights: ``scaled`` by D, or ``ste``, unchanged.',
        module='Progressive gradient flow: MdGf, mask decay, and SdGf, structure decay.\n\nAfter Bambhaniya et al. 2024 (arXiv 2402.04744). A run is dense for a fraction ``dense`` of its steps\nand N:M exactly for the last fraction ``final``. In between it goes from one to the other.\n\n- MdGf: pruned weights fade out. Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense\n  phase, the mask m chosen anew at every step. D falls linearly or exponentially from 1 to 0. The\n  gradient is that of this product, so pruned weights receive less and less of it\n  (``grad_mode="scaled"``, the paper\'s idea); the authors\' code passes it on unchanged (``"ste"``).\n- SdGf: the pattern tightens in frames of equal length, with hard masks and the straight-through\n  gradient. Stepwise, ever sparser: ``M-1:M, M/2:M, ..., N:M``. Geometric, as sparse as the target\n  in ever smaller groups: ``8N:8M, 4N:4M, 2N:2M, N:M``. With ``densify``, an ablation of the\n  authors\' code, ever denser: ``N:8M, N:4M, N:2M, N:M``.\n\nCost: STE\'s. MdGf also has one pass over the sparse weights for the faded part and one for the\ngradient, and dense products until D is 0.',
        keys={
            'dense': Field(0.1, ranges.FRACTION, ranges.between(0.0, 0.4), meaning="the fraction of all steps at the beginning that is dense. Its default and that of ``final`` are ours; the papers' differ by model."),
            'final': Field(0.2, ranges.number(0, 1, open_low=True), ranges.between(0.05, 0.5), meaning='the fraction of all steps at the end that is N:M exactly; with ``dense`` at most 1.'),
            'tau': Field(None, ranges.number(0, open_low=True, optional=True), None, meaning='how fast D falls, per step. By default the fall takes the phase between ``dense`` and ``final``.'),
            'grad_mode': Field('scaled', ranges.one_of('scaled', 'ste'), None, meaning='the gradient of pruned weights: ``scaled`` by D, or ``ste``, unchanged.'),
        },
    ),
    'nmrun.recipes.gradient_flow.MdGfExponential': RecipeFacts(
        title='MdGf-Exponential',
        takes_blocks=False,
        about='Pruned weights fade exponentially, ``D(j) = exp(-tau j)``.\n\nWhen to use: a translation model from scratch, for nearly as many\nmultiplications as dense training. Not a small language model.',
        module='Progressive gradient flow: MdGf, mask decay, and SdGf, structure decay.\n\nAfter Bambhaniya et al. 2024 (arXiv 2402.04744). A run is dense for a fraction ``dense`` of its steps\nand N:M exactly for the last fraction ``final``. In between it goes from one to the other.\n\n- MdGf: pruned weights fade out. Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense\n  phase, the mask m chosen anew at every step. D falls linearly or exponentially from 1 to 0. The\n  gradient is that of this product, so pruned weights receive less and less of it\n  (``grad_mode="scaled"``, the paper\'s idea); the authors\' code passes it on unchanged (``"ste"``).\n- SdGf: the pattern tightens in frames of equal length, with hard masks and the straight-through\n  gradient. Stepwise, ever sparser: ``M-1:M, M/2:M, ..., N:M``. Geometric, as sparse as the target\n  in ever smaller groups: ``8N:8M, 4N:4M, 2N:2M, N:M``. With ``densify``, an ablation of the\n  authors\' code, ever denser: ``N:8M, N:4M, N:2M, N:M``.\n\nCost: STE\'s. MdGf also has one pass over the sparse weights for the faded part and one for the\ngradient, and dense products until D is 0.',
        keys={
            'dense': Field(0.1, ranges.FRACTION, ranges.between(0.0, 0.4), meaning="the fraction of all steps at the beginning that is dense. Its default and that of ``final`` are ours; the papers' differ by model."),
            'final': Field(0.2, ranges.number(0, 1, open_low=True), ranges.between(0.05, 0.5), meaning='the fraction of all steps at the end that is N:M exactly; with ``dense`` at most 1.'),
            'tau': Field(None, ranges.number(0, open_low=True, optional=True), None, meaning='how fast D falls, per step. By default the fall takes the phase between ``dense`` and ``final``.'),
            'grad_mode': Field('scaled', ranges.one_of('scaled', 'ste'), None, meaning='the gradient of pruned weights: ``scaled`` by D, or ``ste``, unchanged.'),
        },
    ),
    'nmrun.recipes.gradient_flow.SdGfStepwise': RecipeFacts(
        title='SdGf-Stepwise',
        takes_blocks=False,
        about='STE with ever sparser patterns, M-1:M to N:M. M / N must be a power of two.\n\nWhen to use: images from scratch under Adam, and at 1:8 and 1:16 under SGD. Not text.',
        module='Progressive gradient flow: MdGf, mask decay, and SdGf, structure decay.\n\nAfter Bambhaniya et al. 2024 (arXiv 2402.04744). A run is dense for a fraction ``dense`` of its steps\nand N:M exactly for the last fraction ``final``. In between it goes from one to the other.\n\n- MdGf: pruned weights fade out. Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense\n  phase, the mask m chosen anew at every step. D falls linearly or exponentially from 1 to 0. The\n  gradient is that of this product, so pruned weights receive less and less of it\n  (``grad_mode="scaled"``, the paper\'s idea); the authors\' code passes it on unchanged (``"ste"``).\n- SdGf: the pattern tightens in frames of equal length, with hard masks and the straight-through\n  gradient. Stepwise, ever sparser: ``M-1:M, M/2:M, ..., N:M``. Geometric, as sparse as the target\n  in ever smaller groups: ``8N:8M, 4N:4M, 2N:2M, N:M``. With ``densify``, an ablation of the\n  authors\' code, ever denser: ``N:8M, N:4M, N:2M, N:M``.\n\nCost: STE\'s. MdGf also has one pass over the sparse weights for the faded part and one for the\ngradient, and dense products until D is 0.',
        keys={
            'dense': Field(0.1, ranges.FRACTION, ranges.between(0.0, 0.4), meaning="the fraction of all steps at the beginning that is dense. Its default and that of ``final`` are ours; the papers' differ by model."),
            'final': Field(0.2, ranges.number(0, 1, open_low=True), ranges.between(0.05, 0.5), meaning='the fraction of all steps at the end that is N:M exactly; with ``dense`` at most 1.'),
        },
    ),
    'nmrun.recipes.gradient_flow.SdGfGeometric': RecipeFacts(
        title='SdGf-Geometric',
        takes_blocks=False,
        about="STE with the final density in ever smaller groups, 8N:8M to N:M.\n\nWhen to use: where training must have its final density from the start. It was compared on\nthe digits alone.\n\nArgs:\n    frames: how many patterns, 4 in the authors' code. A layer's inputs must be a multiple of\n        M * 2^(frames - 1).\n    densify: every pattern has the target's N instead of its density (an ablation).",
        module='Progressive gradient flow: MdGf, mask decay, and SdGf, structure decay.\n\nAfter Bambhaniya et al. 2024 (arXiv 2402.04744). A run is dense for a fraction ``dense`` of its steps\nand N:M exactly for the last fraction ``final``. In between it goes from one to the other.\n\n- MdGf: pruned weights fade out. Forward ``w * (m + (1 - m) * D(j))``, j the steps since the dense\n  phase, the mask m chosen anew at every step. D falls linearly or exponentially from 1 to 0. The\n  gradient is that of this product, so pruned weights receive less and less of it\n  (``grad_mode="scaled"``, the paper\'s idea); the authors\' code passes it on unchanged (``"ste"``).\n- SdGf: the pattern tightens in frames of equal length, with hard masks and the straight-through\n  gradient. Stepwise, ever sparser: ``M-1:M, M/2:M, ..., N:M``. Geometric, as sparse as the target\n  in ever smaller groups: ``8N:8M, 4N:4M, 2N:2M, N:M``. With ``densify``, an ablation of the\n  authors\' code, ever denser: ``N:8M, N:4M, N:2M, N:M``.\n\nCost: STE\'s. MdGf also has one pass over the sparse weights for the faded part and one for the\ngradient, and dense products until D is 0.',
        keys={
            'dense': Field(0.1, ranges.FRACTION, ranges.between(0.0, 0.4), meaning="the fraction of all steps at the beginning that is dense. Its default and that of ``final`` are ours; the papers' differ by model."),
            'final': Field(0.2, ranges.number(0, 1, open_low=True), ranges.between(0.05, 0.5), meaning='the fraction of all steps at the end that is N:M exactly; with ``dense`` at most 1.'),
            'frames': Field(4, ranges.whole(1), None, meaning="how many patterns, 4 in the authors' code. A layer's inputs must be a multiple of M * 2^(frames - 1)."),
            'densify': Field(False, ranges.FLAG, None, meaning="every pattern has the target's N instead of its density (an ablation)."),
        },
    ),
    'nmrun.recipes.lbc.LBC': RecipeFacts(
        title='LBC',
        takes_blocks=False,
        about='A score for every possible mask of a group; the worst are dropped until one is left.\n\nWhen to use: small patterns, since every possible mask of a group has a score (1.5 a weight at\n2:4, 1 at 1:M). It was compared on the digits alone.\n\nArgs:\n    t_i: the fraction of all steps at which candidates begin to be dropped.\n    t_f: the fraction of all steps at which one candidate is left.',
        module='LBC, learning the best combination: every possible mask of a group has a score; the worst go\n(Zhang et al. 2022, arXiv 2206.06662).\n\nA group starts with all C = (M over N) candidates, hence dense; the forward mask is the union of\nthose left. Score k receives the gradient ``sum over its members of g * w``, the weights receive ``m\n* g``. Between the fractions ``t_i`` and ``t_f`` of the run the number of candidates falls from C to\n1, by the cube of the time left. From then on the mask is fixed. Of equal scores, as of dead inputs,\nthose stay that keep more of |w|: the paper leaves it open. The scores are parameters of the\noptimizer, with the settings of its first group.\n\nCost: one matrix product of (weights / M, M) by (M, C) a step until ``t_f``, then a fixed mask.',
        keys={
            't_i': Field(0.0, ranges.FRACTION, None, meaning='the fraction of all steps at which candidates begin to be dropped.'),
            't_f': Field(0.5, ranges.number(0, 1, open_low=True, open_high=True), None, meaning='the fraction of all steps at which one candidate is left.'),
        },
    ),
    'nmrun.recipes.maskllm.MaskLLM': RecipeFacts(
        title='MaskLLM',
        takes_blocks=False,
        about="Learned masks for a network whose weights are frozen.\n\nWhen to use: a trained network whose weights should stay. SparseGPT does as well at 2:4, in a\ntenth of the time.\n\nArgs:\n    kappa: factor of the logits, one for each mask of a group, at the start and at the end.\n    temperature: that of the softmax over a group's masks, at the start and at the end.\n    prior: how much logits start out preferring large weights, or those that ``masks`` keeps.\n    masks: the folder of a finished N:M run of the same network, such as that of nmrun prune,\n        or a .safetensors file of its parameters; null: the masks of the largest weights.\n    reg: the weight of a bonus in the loss, the sum of squares that the masks keep. It falls to 0,\n        linearly.\n    lr_mult: the learning rate of the logits, over that of the first parameter group.\n    dense: fraction of all steps trained first; 0 for a model that comes trained.",
        module="MaskLLM: frozen weights, learnable masks (Fang et al. 2024, arXiv 2409.17481, NeurIPS 2024).\n\nEach group has a logit for every possible mask. Forward ``w * (softmax((kappa * logits + Gumbel\nnoise) / temperature) @ candidates)``; kappa rises and the temperature falls, linearly, until a\nblend of masks is one mask. At iteration it of the n that learn masks, the loss has\n``- reg * (1 - it / n) * ||w * mask||^2`` added, as in the authors' code. All weights are frozen from\n``dense`` of the steps on. Evaluation is by the likeliest masks, which the last step leaves.\n\nCost: C / M logits a weight, C = (M over N), with optimizer state; a softmax and three products of\n(weights / M, M) by (M, C) a step.",
        keys={
            'kappa': Field([100.0, 500.0], ranges.SPAN, None, meaning='factor of the logits, one for each mask of a group, at the start and at the end.'),
            'temperature': Field([4.0, 0.05], ranges.SPAN, None, meaning="that of the softmax over a group's masks, at the start and at the end."),
            'prior': Field(3.0, ranges.number(0), None, meaning='how much logits start out preferring large weights, or those that ``masks`` keeps.'),
            'masks': Field(None, ranges.WEIGHTS, None, meaning='the folder of a finished N:M run of the same network, such as that of nmrun prune, or a .safetensors file of its parameters; null: the masks of the largest weights.'),
            'reg': Field(1e-05, ranges.number(0), None, meaning='the weight of a bonus in the loss, the sum of squares that the masks keep. It falls to 0, linearly.'),
            'lr_mult': Field(10.0, ranges.number(0, open_low=True), None, meaning='the learning rate of the logits, over that of the first parameter group.'),
            'dense': Field(0.5, ranges.FRACTION, None, meaning='fraction of all steps trained first; 0 for a model that comes trained.'),
        },
    ),
    'nmrun.recipes.slope.SLoPe': RecipeFacts(
        title='SLoPe',
        takes_blocks=False,
        about="A mask of the initial weights that stays; the input gradient prunes once more.\n\nWhen to use: long pre-training where the cost of a step counts: the forward mask stays. It was\ncompared in retraining alone.\n\nArgs:\n    mask: the ``largest`` initial weights, as in the authors' code, or ``random`` ones, drawn anew\n        for each seed.\n\nGrouped convolutions, outputs that M does not divide and what ``layer.install`` leaves alone keep\nthe exact input gradient.",
        module="SLoPe: a mask that stays from the first step on, and double pruning (Mozaffari et al. 2024, arXiv\n2405.16325).\n\nThe mask is chosen once, on the initial weights; pruned weights stay 0, so the weight's gradient is\nmasked. The input gradient ``dX = dZ W`` sums over the outputs: there the masked weight is pruned\nonce more, to N:M along the outputs, by magnitude after every step. So all three products have an\nN:M operand or result, and no mask is searched for in training. Not here: the paper's low-rank\nadapters of the last 1 % of the steps, new parameters of the network. Its figures without adapters\n(rank 0) are those to compare with.\n\nCost: STE's without the mask search, and a second mask a step.",
        keys={
            'mask': Field('largest', ranges.one_of('largest', 'random'), None, meaning="the ``largest`` initial weights, as in the authors' code, or ``random`` ones, drawn anew for each seed."),
        },
    ),
    'nmrun.recipes.ast.AST': RecipeFacts(
        title='AST',
        takes_blocks=False,
        about="STE with a decay of pruned weights that grows, to retrain a trained network.\n\nWhen to use: retraining a trained language model for a tenth of its original steps, with a dense\nteacher. Tune ``decay`` together with the learning rate.\n\nArgs:\n    decay: the decay of pruned weights at the end of its rise, the paper's lambda.\n    rise: the fraction of all steps in which the decay rises from 0.\n    interval: optimizer steps that a mask stays.",
        module="AST, the Adaptive Sparse Trainer: retraining with a decay of the pruned weights that grows (Huang\net al. 2024, arXiv 2407.20584, AAAI 2025).\n\nThe forward pass uses ``m * w`` with straight-through gradients; the mask is chosen anew every\n``interval`` steps. Pruned weights decay as in SR-STE, by a factor l that rises linearly from 0 to\n``decay``. The decay has no momentum, as in the paper: ``u = m1 + l * (1 - m) * w`` in\n:class:`AdamDecay`.\n\nThe paper's teacher, the dense network, is ``trainer.distill``. Not here: its masks by Wanda's\nscores, and its low-rank weights beside the sparse ones (SLoRB).\n\nCost: a mask byte a weight; some ten passes over the sparse weights.",
        keys={
            'interval': Field(10, ranges.whole(1), None, meaning='optimizer steps that a mask stays.'),
            'decay': Field(0.0001, ranges.number(0), ranges.log(1e-06, 0.01), meaning="the decay of pruned weights at the end of its rise, the paper's lambda."),
            'rise': Field(0.25, ranges.FRACTION, ranges.between(0.0, 0.5), meaning='the fraction of all steps in which the decay rises from 0.'),
        },
    ),
    'nmrun.recipes.cast.CAST': RecipeFacts(
        title='CAST',
        takes_blocks=False,
        about="A growing L1 decay that draws a trained network's weights to N:M.\n\nWhen to use: retraining a trained language model from its dense weights, with a dense\nteacher.\n\nArgs:\n    decay: the decay of pruned weights, the paper's lambda: 4e-7 for Llama-2 7B there. It is of the order\n        of the gradients.\n    interval: optimizer steps that a mask stays.\n    parts: into how many spans the inputs of an output are cut; each has a learned scale.",
        module="CAST: dense weights that a growing L1 decay draws to N:M (Huang et al. 2025, arXiv 2509.25996).\n\nThe forward pass is dense until the last step: ``w * s``, with learnable scales s\n(:class:`PartScales`). The mask is chosen anew every ``interval`` steps. AdamS (algorithm 1) moves\nthe other weights less and less by their gradients, more and more towards zero. With Adam's first\nmoment m1, a = (t - 1) / T at step t, and the step of :class:`nmrun.recipes.ast.AdamDecay`::\n\n    u = (1 - a) * m1 + a * decay * sign(w)   for pruned weights,   m1 for kept ones\n\nIn the end pruned weights become 0 and ``w * s`` is the weight. The paper's teacher is\n``trainer.distill``.\n\nCost: a mask byte a weight; some fifteen passes over the sparse weights.",
        keys={
            'interval': Field(10, ranges.whole(1), None, meaning='optimizer steps that a mask stays.'),
            'decay': Field(4e-07, ranges.number(0), ranges.log(1e-08, 0.01), meaning="the decay of pruned weights, the paper's lambda: 4e-7 for Llama-2 7B there. It is of the order of the gradients."),
            'parts': Field(2, ranges.whole(1), None, meaning='into how many spans the inputs of an output are cut; each has a learned scale.'),
        },
    ),
    'nmrun.recipes.proxsparse.ProxSparse': RecipeFacts(
        title='ProxSparse',
        takes_blocks=False,
        about="Masks by a regulariser that draws weights to N:M; they get their old values back.\n\nWhen to use: a trained network whose weights should stay, and little data. SparseGPT was\nbetter at 4:8 and 1:4.\n\nArgs:\n    strength: the weight of the regulariser, the paper's lambda; its scripts have 0.2 to 25, by network.\n    dense: fraction of all steps trained first; 0 for a model that comes trained.",
        module="ProxSparse: learn masks by a regulariser that is 0 for N:M weights (Liu et al. 2025, arXiv\n2502.00258, ICML 2025).\n\nProximal gradient descent: after every optimizer step a weight w becomes the minimiser of ``1/2 ||u\n- w||^2 + strength * R(u)``. The regulariser R of a group is the sum over all choices of N + 1 of\nits weights of the product of their magnitudes: 0 exactly for groups with at most N non-zeros. The\npaper has 2:4, where it is ``|abc| + |abd| + |acd| + |bcd|``. The forward pass uses the dense\nweights on the way, which R draws to N:M groups. In the end the N largest of the moved weights are\nkept, with the values that all weights had before. What is not sparse stays as it was; the authors'\ncode moves it and takes the old values in the end. Not here: the paper's other regulariser, which\ndraws weights to those values.\n\nCost: a copy of the weights, and an iteration over every group after each step.",
        keys={
            'strength': Field(0.25, ranges.number(0, open_low=True), ranges.log(0.01, 30.0), meaning="the weight of the regulariser, the paper's lambda; its scripts have 0.2 to 25, by network."),
            'dense': Field(0.5, ranges.FRACTION, None, meaning='fraction of all steps trained first; 0 for a model that comes trained.'),
        },
    ),
    'nmrun.recipes.sqft.SQFT': RecipeFacts(
        title='SQFT',
        takes_blocks=True,
        about="Masked low-rank adapters on a pruned network, whose weights stay.\n\nWhen to use: fine-tuning a pruned network with few trained parameters.\n\nArgs:\n    rank: the adapters' rank.\n    alpha: the adapters' product is multiplied by ``alpha / rank``.",
        module="SQFT's SparsePEFT: low-rank adapters that are merged and stay N:M (Munoz et al. 2024, arXiv\n2410.03750, section 3.2).\n\nA pruned weight w0 stays, and so does its mask m. Trained are the adapters B (outputs, rank) and A\n(rank, inputs), whose product is masked: ``w = w0 + m * (alpha / rank) * B A``. So w is N:M at every\nmoment. A convolution's inputs are its channels at each kernel position. Let g be the weight's\ngradient and ``g' = (alpha / rank) * m * g``. Then B has the gradient ``g' A^T`` and A has ``B^T\ng'``. B begins as 0 and A uniform, drawn anew for each seed. Not here: the paper's search for ranks,\nand quantisation.\n\nCost: w0 and a mask byte a weight; no moments of the optimizer but those of the adapters.",
        keys={
            'rank': Field(32, ranges.whole(1), ranges.among(8, 16, 32, 64), meaning="the adapters' rank."),
            'alpha': Field(64.0, ranges.number(0, open_low=True), None, meaning="the adapters' product is multiplied by ``alpha / rank``."),
        },
    ),
}
