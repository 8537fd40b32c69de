"""Attention: every position looks at others and takes a weighted mean of what it finds.

    o_i = sum over j allowed of  softmax_j(score(q_i, k_j) + bias_ij)  v_j          in each head

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762. One key head for all queries: Shazeer 2019,
arXiv:1911.02150; a few: Ainslie et al. 2023, arXiv:2305.13245. Over an encoder's memory: Bahdanau et al. 2015.
"""

from regard.bases.multihead import MultiHead


class Attention(MultiHead):
    """Multi-head attention, over the sequence itself or over the encoder's memory.

    kv_heads: key and value heads, shared by groups of query heads; 1 is multi-query, None as many as heads.
    dim:      channels of a head; None: width / heads.
    over:     "self", or "memory": keys come from the encoder, once.
    pattern:  who may look at whom. Causal in a decoder.
    position: acts on queries, keys, values or scores: rotary, alibi, t5, shaw, ... "shared": the stack's own.
    score:    how a query and a key are compared.
    project:  which of q, k, v, o(ut) are learned maps; the others are the identity.
    bias:     the maps that have one: True all, False none, or their letters.
    norm:     on the heads' output before the last map.
    qk_norm:  on each query and key, over the channels of a head.
    """

    examples = (
        {},
        {"kv_heads": 1, "pattern": "causal & window(5)", "position": "rotary"},
        {"score": "additive", "position": "none"},
        {"over": "memory", "pattern": "everything"},
        {"pattern": "everything", "position": "rotary"},
    )
