// -- pieces of a row of tiles ------------------------------------------------------------------------------------

struct Piece {
    Int start;
    int kind;
};

struct Pieces {  // in order; each goes on to where the next begins, the last to the end of the row
    Buffer<Piece> held, spare;
    Int columns;

    explicit Pieces(Int columns) : columns(columns) {}
    bool failed() const { return held.failed || spare.failed; }
    Int stop(Int i) const { return i + 1 < held.size ? held.data[i + 1].start : columns; }
    int kind(Int i) const { return i >= 0 && i < held.size ? held.data[i].kind : EMPTY; }

    // Joins neighbours of one kind to one piece, and leaves out EMPTY ones before the first.
    void join() {
        Int n = 0;
        int before = EMPTY;
        for (Int i = 0; i < held.size; i++) {
            const Piece piece = held.data[i];
            if ((piece.kind != before || piece.kind == OPEN) && piece.start < columns) held.data[n++] = piece;
            before = piece.kind;
        }
        held.size = n;
    }

    // Cuts open pieces into pieces of `width` tiles, the first ones first, while there is room.
    void split(Int width, Int room) {
        spare.size = 0;
        Int further = 0;
        for (Int i = 0; i < held.size; i++) {
            const Piece piece = held.data[i];
            Int parts = piece.kind == OPEN ? (stop(i) - piece.start + width - 1) / width : 1;
            further += parts - 1;
            if (further > room - held.size) parts = 1;
            for (Int j = 0; j < parts; j++) spare.add({piece.start + j * width, piece.kind});
        }
        swap();
    }
    void swap() {
        Piece *data = held.data;
        const Int size = held.size, room = held.room;
        held.data = spare.data, held.size = spare.size, held.room = spare.room;
        spare.data = data, spare.size = size, spare.room = room;
    }

    // Cuts coarse to fine: half the room at first, then four pieces for one, down to a tile. Whether room ran out.
    template <class Ask> bool refine(Int most, Ask ask) {
        const Int room = minimum(most, columns);
        held.size = 0;
        held.add({0, OPEN});
        const Int half = maximum(most / 2, 1);
        for (Int width = columns <= room ? 1 : (columns + half - 1) / half;; width = (width + 3) / 4) {
            join();
            split(width, room);
            for (Int i = 0; i < held.size; i++)
                if (held.data[i].kind == OPEN) held.data[i].kind = ask(held.data[i].start, stop(i));
            if (width <= 1) break;
        }
        bool left = false;
        for (Int i = 0; i < held.size; i++)
            if (held.data[i].kind == OPEN) held.data[i].kind = PARTIAL, left = true;
        join();
        return left;
    }

    // Writes records (lo, full_lo, full_hi, hi), at most n. Partial, full, partial are one record; every other full
    // piece begins a new one. Pieces without room become part of the last record, as PARTIAL: returns whether any did.
    bool records(Int n, int32_t *bounds, int32_t *count) const {
        Int total = 0, end = 0;
        for (Int i = 0; i < held.size; i++) {
            if (kind(i) == EMPTY) continue;
            end = stop(i);
            const bool follows = kind(i - 1) == PARTIAL && kind(i - 2) == EMPTY;
            if (kind(i - 1) != EMPTY && (kind(i) != FULL || follows)) continue;
            if (total++ >= n) continue;
            const Int full = kind(i) == FULL ? i : i + 1;
            const bool has = kind(full) == FULL;
            const Int hi = stop(has ? full + (kind(full + 1) == PARTIAL) : i);
            int32_t *record = bounds + 4 * (total - 1);
            record[0] = (int32_t)held.data[i].start, record[3] = (int32_t)hi;
            record[1] = (int32_t)(has ? held.data[full].start : hi), record[2] = (int32_t)(has ? stop(full) : hi);
        }
        if (total > n) {
            int32_t *record = bounds + 4 * (n - 1);
            if (record[1] == record[3]) record[1] = record[2] = (int32_t)end;
            record[3] = (int32_t)end;
        }
        *count = (int32_t)minimum(total, n);
        return total > n;
    }
};

// Intervals of tiles united: pieces of a row, PARTIAL where a hidden interval reaches.
template <int SEEN, int HIDDEN> struct Sweep {
    Int columns, k0, bk, lo[SEEN + HIDDEN], hi[SEEN + HIDDEN], ends[2 * (SEEN + HIDDEN) + 1];
    int n;

    Sweep(Int columns, Int k0, Int bk) : columns(columns), k0(k0), bk(bk), n(0) {}
    void tiles(Int start, Int stop) { lo[n] = start, hi[n++] = stop; }
    void keys(Int first, Int last) {
        const Int start = clip(floordiv(first - k0, bk), 0, columns);
        tiles(start, last >= first ? clip(floordiv(last - k0, bk) + 1, 0, columns) : start);
    }
    bool covered(int from, int to, Int at) const {
        bool hit = false;
        for (int i = from; i < to; i++) hit |= lo[i] <= at && at < hi[i];
        return hit;
    }
    void into(Pieces &found) {
        int m = 0;
        ends[m++] = 0;
        for (int i = 0; i < 2 * n; i++) {
            const Int x = i < n ? lo[i] : hi[i - n];
            int j = m++;
            for (; j > 1 && ends[j - 1] > x; j--) ends[j] = ends[j - 1];
            ends[j] = x;
        }
        found.held.size = 0;
        for (int i = 0; i < m; i++) {
            const Int start = ends[i];
            if ((i + 1 < m ? ends[i + 1] : columns) <= start) continue;
            found.held.add({start, !covered(0, SEEN, start) ? EMPTY : covered(SEEN, n, start) ? PARTIAL : FULL});
        }
        found.join();
    }
};
