def my_ring(rank):
    """Attention of this rank's rows to the keys of all ranks: (out, lse). K and V go around, from each rank to rank.right."""
    k, v, outs, lses = rank.k, rank.v, [], []
    for step in range(rank.ranks):  # solution
        if step < rank.ranks - 1:  # solution
            rank.send(rank.right, step, k=k, v=v)  # solution
        whose = (rank.index - step) % rank.ranks  # solution
        out, lse = rank.attend(k, v, of=whose)  # solution
        outs.append(out)  # solution
        lses.append(lse)  # solution
        if step < rank.ranks - 1:  # solution
            k, v = yield rank.receive(rank.left)  # solution
    return fl.merge(outs, lses)  # solution
