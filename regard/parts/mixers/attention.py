"""Multi-head attention: the output of a position is a weighted mean of the values of the positions it attends to.

    o_i = sum over j allowed of  softmax_j(score(q_i, k_j) + bias_ij)  v_j          in each head

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762. Multi-query attention: Shazeer 2019,
arXiv:1911.02150; grouped-query: Ainslie et al. 2023, arXiv:2305.13245. Over an encoder's memory: Bahdanau et al. 2015.
"""

from regard.bases.multihead import MultiHead


class Attention(MultiHead):
    """Multi-head attention, over the sequence itself or over the encoder's memory.

    kv_heads: number of key and value heads, each shared by a group of query heads; 1: multi-query; None: as many as
              heads.
    dim:      channels of a head; None: width / heads.
    over:     "self", or "memory": keys and values come from the encoder, computed once.
    pattern:  which keys each query may attend to; causal in a decoder.
    position: position that acts on queries, keys, values or scores: rotary, alibi, t5, shaw, ...; "shared": the one of
              the stack.
    score:    how the score of a query and a key is computed.
    project:  which of q, k, v, o (output) are learned projections; the others are the identity.
    bias:     which projections have a bias: True for all, False for none, or their letters.
    norm:     norm on the output of the heads, before the output projection.
    qk_norm:  norm on each query and key, over the channels of a head.
    """

    examples = (
        {},
        {"kv_heads": 1, "pattern": "causal & window(5)", "position": "rotary"},
        {"score": "additive", "position": "none"},
        {"over": "memory", "pattern": "everything"},
        {"pattern": "everything", "position": "rotary"},
    )
