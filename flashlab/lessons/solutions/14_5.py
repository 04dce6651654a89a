def my_schedule(rank):
    """Attention of this rank's rows to the keys of all ranks: (out, lse). Ranks 0 to 3 are a host, and 4 to 7 another one."""
    half = rank.ranks // 2
    host = rank.index // half * half  # the first rank of this one's host
    twin = (rank.index + half) % rank.ranks  # the rank in its place on the other host
    peers = [host + (rank.index + i) % half for i in range(1, half)]  # solution
    for peer in peers:  # solution
        rank.send(peer, "own", k=rank.k, v=rank.v)  # solution
    rank.send(twin, "across", k=rank.k, v=rank.v)  # solution
    parts = [rank.attend(rank.k, rank.v, of=rank.index)]  # solution
    for peer in reversed(peers):  # solution
        k, v = yield rank.receive(peer)  # solution
        parts.append(rank.attend(k, v, of=peer))  # solution
    k, v = yield rank.receive(twin)  # solution
    for peer in peers:  # solution
        rank.send(peer, "theirs", k=k, v=v)  # solution
    parts.append(rank.attend(k, v, of=twin))  # solution
    for peer in reversed(peers):  # solution
        k, v = yield rank.receive(peer)  # solution
        parts.append(rank.attend(k, v, of=(peer + half) % rank.ranks))  # solution
    outs, lses = [part[0] for part in parts], [part[1] for part in parts]  # solution
    return fl.merge(outs, lses)  # solution
