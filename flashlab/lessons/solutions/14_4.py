def my_decoding(rank):
    """Attention of this rank's heads to the keys of all ranks: (out, lse). rank.k and rank.v are some keys of all KV heads."""
    heads = rank.q.shape[1]
    for peer in range(rank.ranks):  # solution
        rank.send(peer, "queries", q=rank.q)  # solution
    queries = []  # solution
    for peer in range(rank.ranks):  # solution
        queries.append((yield rank.receive(peer)))  # solution
    out, lse = rank.attention(np.concatenate(queries, axis=1), rank.k, rank.v)  # solution
    for peer in range(rank.ranks):  # solution
        theirs = slice(peer * heads, (peer + 1) * heads)  # solution
        rank.send(peer, "outputs", out=out[:, theirs], lse=lse[:, theirs])  # solution
    outs, lses = [], []  # solution
    for peer in range(rank.ranks):  # solution
        out, lse = yield rank.receive(peer)  # solution
        outs.append(out)  # solution
        lses.append(lse)  # solution
    return fl.merge(outs, lses)  # solution
