"""Pairs of sentences, and fairseq's Transformer: tables of STEP, S-STE and the gradient-flow recipes,
and the comparison of translation. It needs fairseq (``nmrun[translation]``).
"""
