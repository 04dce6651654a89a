def my_way_back(rank):
    """The gradients of this rank's rows and keys: (dq, dk, dv). K and V go around again, and dK and dV follow them."""
    k, v, dq = rank.k, rank.v, 0
    for step in range(rank.ranks):  # solution
        if step < rank.ranks - 1:  # solution
            rank.send(rank.right, f"keys {step}", k=k, v=v)  # solution
        dq_part, dk, dv = rank.attend_back(k, v, of=(rank.index - step) % rank.ranks)  # solution
        dq = dq + dq_part  # solution
        if step == 0:  # solution
            own_dk, own_dv = dk, dv  # solution
        else:  # solution
            if step > 1:  # solution
                dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution
                dk, dv = dk_so_far + dk, dv_so_far + dv  # solution
            rank.send(rank.right, f"sums {step}", dk=dk, dv=dv)  # solution
        if step < rank.ranks - 1:  # solution
            k, v = yield rank.receive(rank.left)  # solution
    if rank.ranks > 1:  # solution
        dk_so_far, dv_so_far = yield rank.receive(rank.left)  # solution
        own_dk, own_dv = dk_so_far + own_dk, dv_so_far + own_dv  # solution
    return dq, own_dk, own_dv  # solution
