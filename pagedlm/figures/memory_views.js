// Two views of the memory, for the player (player.js stands before this file):
//   paging    the line, the logical blocks of every sequence and its block table, the pool and the CPU pool; contiguous spans the same way
//   sharing   sequences as rows of blocks; a block that several hold is drawn once and spans their rows, as in a tree of their tables
// What tests read: .pool, .cpu and .bands > [data-block] with data-refs, data-fill and data-state; [data-entry] "seq place block";
// arrows with data-copy, data-out, data-in (from, to); curves with data-link (block), data-fork, data-beam (parent, child).
(() => {
  const {el, text, colour, ink, box, hatch, chip, cross, slots, poolFacts, views} = pagedlm;
  const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
  const sum = numbers => numbers.reduce((a, b) => a + b, 0);
  const count = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
  const clip = (name, most) => name.length > most ? name.slice(0, most - 1) + '…' : name;
  const list = blocks => blocks.size > 12 ? count(blocks.size, 'block') : [...blocks].sort((a, b) => a - b).join(', ');
  const size10 = 'font-size: 10px', middle = {'text-anchor': 'middle'}, right = {'text-anchor': 'end'};
  const thin = {fill: 'none', stroke: 'var(--line)'}, dashed = {...thin, 'stroke-dasharray': '3 2'};
  const thick = {fill: 'none', stroke: 'currentColor', 'stroke-width': 2}, broken = {'stroke-dasharray': '4 2'};
  const never = {fill: 'none', stroke: slots.internal}, moved = '#6677CC', several = '#666666';      // swapped; held by several requests

  const rect = (x, y, width, height, attrs) => el('rect', {x, y, width, height, ...attrs});
  const path = (d, attrs) => el('path', {d, ...attrs});

  // ---- what a film needs at most, so that the picture keeps its size

  const known = new WeakMap();

  function reach(film) {
    const k = known.get(film) ?? {last: null, longest: 1, tables: new Set(), width: 1, out: 0, has: new Set()};
    let i = film.frames.length;
    while (i > 0 && film.frames[i - 1] !== k.last) i--;
    for (; i < film.frames.length; i++) {
      const frame = film.frames[i];
      for (const [seq, table] of Object.entries(frame.tables ?? {})) {
        k.tables[table ? 'add' : 'delete'](seq);
        k.longest = Math.max(k.longest, table?.length ?? 0);
      }
      k.width = Math.max(k.width, k.tables.size);
      k.out = Math.max(k.out, (frame.swapped ?? []).length);
      for (const name of ['copies', 'beams', 'forks', 'cached', 'outs']) if (frame[name]) k.has.add(name);
      for (const [name, blocks] of Object.entries(frame.gone ?? {})) if (blocks.length) k.has.add(name);
      for (const [kind] of frame.events ?? []) k.has.add(kind);
      k.last = frame;
    }
    known.set(film, k);
    return k;
  }

  // ---- what an iteration changes

  const changes = new WeakMap();

  function change(film, f) {
    const made = changes.get(film);
    if (made?.now.frame === film.frames[f]) return made;
    const none = {tables: new Map(), holders: new Map(), rows: []}, before = f > 0 ? film.state(f - 1) : none, now = film.state(f);
    const c = {before, now, taken: new Set(), given: new Set(), found: new Map(), first: f === 0 && now.frame.i > 0};
    for (const [kind, , seq, detail] of now.frame.events ?? [])
      if (kind === 'hit' && now.tables.has(seq)) c.found.set(seq, now.tables.get(seq).slice(0, Math.floor(detail / film.block_size)));
    c.hits = new Set([...c.found.values()].flat());
    const stays = b => before.holders.get(b)?.some(seq => now.tables.has(seq));
    if (!c.first) for (const b of now.holders.keys()) if (!stays(b) && !c.hits.has(b)) c.taken.add(b);
    for (const b of before.holders.keys()) if (!now.holders.has(b)) c.given.add(b);
    c.cached = [...now.cached].filter(b => !now.holders.has(b)).length;
    c.refs = [...now.holders.values()].map(seqs => seqs.length);
    changes.set(film, c);
    return c;
  }

  const events = (now, ...kinds) => (now.frame.events ?? []).filter(e => kinds.includes(e[0]));
  const owners = (film, seqs) => [...new Set(seqs.map(seq => film.owner(seq)))];

  function gone(film, f) {                                    // of a contiguous pool: taken and in no table, or free and of no use
    let i = f;
    while (i > 0 && !film.frames[i].gone) i--;
    const {rounded = [], spare = [], short = []} = film.frames[i].gone ?? {}, {holders} = film.state(f);
    return {rounded: new Set(rounded), spare: new Set(spare), short: new Set(short.filter(b => !holders.has(b)))};
  }

  const limit = (film, seq) => film.memory === 'paged' ? Infinity : film.requests[film.owner(seq)].limit ?? Infinity;
  const unused = (film, tables) => (b, seq) =>
    clamp((tables.get(seq).indexOf(b) + 1) * film.block_size - limit(film, seq), 0, film.block_size);

  function onCPU(film, f) {                                   // filled as far as a sequence was when it last had a row
    const holders = new Map(), fill = new Map(), size = film.block_size;
    for (const [seq, table] of film.state(f).swap) {
      let i = f, row;
      while (i >= 0 && !(row = film.frames[i].rows.find(row => row[0] === seq))) i--;
      table.forEach((b, j) => {
        if (b < 0) return;
        holders.set(b, [...holders.get(b) ?? [], seq]);
        fill.set(b, Math.max(fill.get(b) ?? 0, clamp((row ? row[4] : Infinity) - j * size, 0, size)));
      });
    }
    return {holders, fill, of: r => [...holders].filter(([, seqs]) => film.owner(seqs[0]) === r).map(([b]) => b)};
  }

  // ---- a pool as a grid

  function grid(num, width, height, most) {                   // `per` blocks share a box where there are thousands
    const per = 2 ** Math.max(0, Math.ceil(Math.log2(num / 2048))), cells = Math.ceil(num / per), margin = 12 + 6 * String(num).length;
    for (let cell = most; ; cell -= cell > 16 ? 2 : 1) {
      const band = cell >= 26 ? 12 : 0, left = band ? 1 : margin;
      let columns = Math.max(1, Math.floor((width - left) / cell));
      if (columns > 8) columns -= columns % 4;
      const high = Math.ceil(cells / columns) * (cell + band);
      if (high <= height || cell <= 5) return {num, per, cells, columns, cell, band, left, height: high, gap: band ? 6 : cell > 9 ? 3 : 1};
    }
  }

  const title = (film, g, name) => `${name}: ${count(g.num, 'block')} of ${count(film.block_size, 'token')}` +
    (g.per > 1 ? `, ${g.per} to a box` : '');

  function pill(x, y, label) {                                // black on white in light and in dark
    const w = 7 + 7 * label.length;
    return [rect(x - w / 2, y - 7, w, 14, {rx: 7, fill: '#fff', stroke: '#000'}),
      text(x, y + 4, label, {...middle, style: 'fill: #000; font-size: 11px; font-weight: 600'})];
  }

  const tick = (x, y) => `M${x - 4} ${y}l3 3l5 -6`;

  // pool: holders, fill; sets of blocks cached, rounded, spare, short, taken, given, hits; unused(block, seq), spans, counts.
  function drawPool(svg, film, g, x0, y0, pool, name) {       // returns block -> the middle of its box
    const {per, cell, gap, band, columns, num} = g, w = cell - gap, boxes = el('g', {class: name}), over = el('g');
    const at = k => [x0 + g.left + k % columns * cell, y0 + band + Math.floor(k / columns) * (cell + band)];
    for (let k = 0; k < g.cells; k++) {
      const [x, y] = at(k), blocks = Array.from({length: Math.min(per, num - k * per)}, (_, i) => k * per + i);
      const held = blocks.filter(b => pool.holders.has(b)), seqs = held.flatMap(b => pool.holders.get(b));
      const who = owners(film, seqs).slice(0, 4), tokens = sum(held.map(b => pool.fill.get(b) ?? 0));
      const refs = Math.max(0, ...held.map(b => pool.holders.get(b).length));
      const any = set => set !== undefined && blocks.some(b => set.has(b)), given = any(pool.given);
      const state = held.length ? 'held' : ['rounded', 'spare', 'short', 'cached'].find(kind => any(pool[kind])) ?? 'free';
      const joins = by => pool.spans && held.length && Math.floor((k + by) / columns) === Math.floor(k / columns)
        && pool.holders.get(k + by)?.[0] === seqs[0];
      const wide = w + (joins(1) ? gap : 0), part = wide / who.length, high = w * tokens / film.block_size / per;
      who.forEach((r, i) => {                                 // full: what is filled; pale: the rest of the block
        if (who.length > 1) boxes.append(rect(x + i * part, y, part, w, {fill: colour(r), opacity: 0.28}));
        if (high > 0) boxes.append(rect(x + i * part, y + w - high, part, high, {fill: colour(r)}));
      });
      if (state === 'cached') boxes.append(rect(x + w / 4, y + w / 4, w / 2, w / 2, {fill: slots.cached}));
      const edge = any(pool.taken) ? thick : given ? dashed : thin;
      const look = who.length === 1 ? {fill: colour(who[0]), 'fill-opacity': 0.28} : state === 'spare' ? {fill: 'var(--pale)'} : {};
      boxes.append(rect(x + 0.5, y + 0.5, wide - 1, w - 1,
        {...edge, ...look, 'data-block': k * per, 'data-refs': refs, 'data-fill': tokens, 'data-state': state}));
      if (state === 'rounded') boxes.append(path(cross(x + w / 2, y + w / 2, w / 2 - 3), thin));
      if (state === 'short') boxes.append(path(`M${x + 3} ${y + w - 3}l${w - 6} ${6 - w}`, thin));
      const unused = pool.spans && held.length ? pool.unused(k, seqs[0]) : 0;
      if (unused) boxes.append(path(hatch(x, y, wide, w * unused / film.block_size), {...never, 'data-unused': unused}));
      if (given && state !== 'held' && cell >= 14) over.append(path(`M${x + w / 2 - 4} ${y + w / 2}h8`, thick));
      if (any(pool.hits) && cell >= 14) over.append(path(tick(x + w - 5, y + 5), thick));
      if (held.length && cell >= 22 && (refs > 1 || pool.counts))
        over.append(...pill(x + w / 2, y + w / 2, (pool.counts ? '' : '×') + refs));
      else if (refs > 1) over.append(rect(x + w / 2 - 2, y + w / 2 - 2, 4, 4, {fill: '#fff', stroke: '#000'}));
      const number = String(k * per), mine = who.length === 1 && !joins(-1) ? clip(film.requests[who[0]].id, 4) : '';
      if (!band && k % columns === 0 && cell >= 9) over.append(text(x - 4, y + w / 2 + 4, number, {class: 'dim', ...right, style: size10}));
      if (band) over.append(text(x, y - 3, number, {class: held.length ? '' : 'dim', style: size10}));
      if (band && mine && 6 * (number.length + mine.length) + 4 <= w)
        over.append(text(x + w, y - 3, mine, {class: 'dim', ...right, style: size10}));
    }
    svg.append(boxes, over);
    return b => at(Math.floor(b / per)).map(z => z + w / 2);
  }

  function arrow([x1, y1], [x2, y2], bend, attrs = {}) {
    const mx = (x1 + x2) / 2 - (y2 - y1) * bend, my = (y1 + y2) / 2 + (x2 - x1) * bend, angle = Math.atan2(y2 - my, x2 - mx);
    const back = (by, turn) => `${x2 - by * Math.cos(angle + turn)} ${y2 - by * Math.sin(angle + turn)}`;
    const head = {fill: attrs.stroke ?? 'currentColor', stroke: '#fff', 'stroke-width': 0.7};
    return [path(`M${x1} ${y1}Q${mx} ${my} ${back(7, 0)}`, {...thick, ...attrs}),
      path(`M${x2} ${y2}L${back(10, 0.42)}L${back(10, -0.42)}z`, head)];
  }

  function theLine(svg, film, f, width) {                     // requests without blocks, the head of the line first
    const now = film.state(f), {waiting} = now, thrown = new Set(events(now, 'preempt').map(e => e[1]));
    svg.append(text(0, 12, waiting.length ? 'in line' : 'nobody in line', {class: 'dim small'}));
    let x = 46;
    for (const [i, r] of waiting.entries()) {
      const id = clip(film.requests[r].id, 9), room = 8 + 6.5 * id.length + (thrown.has(r) ? 14 : 0);
      if (x + room > width - (i < waiting.length - 1 ? 64 : 0)) {
        svg.append(text(x, 12, `and ${waiting.length - i} more`, {class: 'small'}));
        return;
      }
      if (thrown.has(r)) svg.append(path(cross(x + 5, 8), {class: 'cut'}));
      svg.append(chip(film, r, x + room - 8 - 6.5 * id.length, 0, id)[0]);
      x += room + 5;
    }
  }

  function legendOf(film) {                                   // marks that both views have
    const {has} = reach(film), grey = {fill: 'currentColor'}, cell = look => rect(6.5, 0.5, 13, 13, look);
    const marks = [[cell(thick), 'taken in this iteration'], [[cell(dashed), path('M9 7h8', thick)], 'given back since the last'],
      [cell(thin), 'free']];
    if (has.has('cached')) marks.push([[rect(9.5, 3.5, 7, 7, {fill: slots.cached}), cell(thin)],
      'cached: held by nobody, may be found'], [path(tick(13, 7), thick), 'found in the cache']);
    if (has.has('copies')) marks.push([arrow([2, 7], [24, 7], 0, broken), 'copied before a write']);
    return {has, grey, cell, marks};
  }

  // ---- paging

  function paging(film, size) {
    const k = reach(film), wide = size.width >= 560, seats = Math.max(film.most.seats, 1), cpu = film.num_swap_blocks;
    const left = wide ? Math.floor(size.width * 0.54) : size.width, x = wide ? left + 12 : 0;
    const full = seats * 38 <= 640, row = full ? 38 : clamp(Math.floor(640 / seats), 10, 20), rows = Math.min(seats, Math.floor(640 / row));
    const label = full ? 88 : 48, room = left - label - 10, digits = String(film.num_blocks - 1).length;
    const entry = clamp(room / k.longest, full ? 8 + 7 * digits : 3, full ? 34 : 14), fits = Math.max(3, Math.floor(room / entry));
    const top = full ? 42 : 28, lanes = cpu ? Math.min(k.out, 4) : 0, leftEnd = top + rows * row + (rows < seats ? 16 : 0) + 6;
    const y = wide ? 0 : leftEnd + 14, pool = grid(film.num_blocks, size.width - x - 2, wide ? 400 : 300, 42);
    const kinds = y + 18 + pool.height + 8, cpuTop = kinds + 22;
    const swap = cpu ? grid(cpu, size.width - x - 2, 130, Math.min(pool.cell, 30)) : null;
    const rightEnd = cpu ? cpuTop + 18 + swap.height + 6 : kinds + 14, outs = wide ? leftEnd : rightEnd;
    const height = Math.max(rightEnd, outs + (lanes ? 18 + lanes * 22 : 0));
    return {wide, seats, left, full, row, rows, label, entry, fits, top, lanes, x, y, pool, kinds, swap, cpuTop, outs, height};
  }

  views.paging = {
    label: 'the block tables of all sequences, and the blocks of the pool',
    height: (film, size) => paging(film, size).height,
    describe(film, f) {
      const {now, taken, given, cached, refs} = change(film, f), {rounded, spare, short} = gone(film, f), cpu = onCPU(film, f);
      const other = {shared: refs.filter(n => n > 1).length, cached, 'kept for samples to come': spare.size, 'rounded off': rounded.size,
        'free in runs too short to use': short.size};
      const free = film.num_blocks - refs.length - cached - spare.size - rounded.size - short.size, id = r => film.requests[r].id;
      const thrown = events(now, 'preempt').filter(e => e[3] !== 'swap').map(e => `${id(e[1])} gave its blocks back and is in line again`);
      const kinds = Object.entries(other).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}, `).join('');
      return [`${refs.length} of ${count(film.num_blocks, 'block')} held, ${kinds}${free} free`,
        ...taken.size ? [`newly taken: ${list(taken)}`] : [], ...given.size ? [`given back: ${list(given)}`] : [],
        ...now.swapped.map(r => `${id(r)} is swapped out to ${count(cpu.of(r).length, 'CPU block')}`),
        ...(now.frame.copies ?? []).map(([src, dst]) => `block ${src} is copied to block ${dst}`),
        ...thrown].join('; ') + '.';
    },
    facts(film, f) {
      const {now, refs} = change(film, f);
      return [['blocks held', `${refs.length} of ${film.num_blocks}`],
        ...film.num_swap_blocks ? [['CPU blocks held', `${onCPU(film, f).holders.size} of ${film.num_swap_blocks}`]] : [],
        ...poolFacts(now.frame)];
    },
    legend(film) {
      const {has, grey, cell, marks} = legendOf(film), paged = film.memory === 'paged';
      const pale = () => rect(6, 0, 14, 14, {...grey, opacity: 0.2});
      const now = [rect(2, 1, 22, 12, {...grey, opacity: 0.2}), rect(2, 1, 10, 12, {...grey, opacity: 0.35}),
        rect(12, 1, 6, 12, {...grey, opacity: 0.8})];
      const out = [[[pale(), rect(6, 6, 14, 8, {...grey, opacity: 0.55}), cell(thin)], 'block with its fill'],
        [now, 'logical: filled before, filled now'], ...marks];
      if (paged && (has.has('forks') || has.has('cached'))) out.push([pill(13, 7, '×2'), 'held by two']);
      if (!paged) out.push([[pale(), cell(thin)], 'reserved'],
        [[pale(), cell(thin), path(hatch(6, 0, 14, 14), never)], 'reserved, and never used']);
      if (has.has('rounded')) out.push([[cell(thin), path(cross(13, 7), thin)], 'rounded off']);
      if (has.has('short')) out.push([[cell(thin), path('M9 11l8 -8', thin)], 'free, in a run too short for the next']);
      if (has.has('spare')) out.push([cell({...thin, fill: 'var(--pale)'}), 'kept for samples to come']);
      out.push([path('M2 3C13 3 13 11 22 11', {fill: 'none', stroke: 'currentColor'}), 'new entry, and its block']);
      if (has.has('outs')) out.push([arrow([2, 7], [24, 7], 0, {stroke: moved}), 'swapped out, or in']);
      if (has.has('preempt')) out.push([path(cross(13, 7), {class: 'cut'}), 'thrown out']);
      return out;
    },
    draw(svg, film, f, size) {
      const at = paging(film, size), c = change(film, f), {now} = c;
      theLine(svg, film, f, at.left);
      const entries = drawTables(svg, film, at, c);
      svg.append(text(at.x, at.y + 12, title(film, at.pool, 'pool'), {class: 'dim small'}));
      const {holders, fill, cached, tables} = now, {taken, given, hits} = c, spans = film.memory !== 'paged' && at.pool.per === 1;
      const place = drawPool(svg, film, at.pool, at.x, at.y + 18,
        {holders, fill, cached, taken, given, hits, spans, unused: unused(film, tables), ...gone(film, f)}, 'pool');
      drawUsage(svg, now.frame.usage ?? [], at.x, at.kinds, size.width - at.x);
      if (at.swap) drawSwap(svg, film, f, at, now, place);
      const copies = now.frame.copies ?? [], width = copies.length > 8 ? 1 : 2;
      for (const [src, dst] of copies)
        svg.append(...arrow(place(src), place(dst), 0.25, {...broken, 'stroke-width': width, 'data-copy': `${src} ${dst}`}));
      const back = new Set((now.frame.ins ?? []).map(pair => pair[1]));           // these have an arrow
      const fresh = entries.filter(([, b]) => (taken.has(b) || hits.has(b)) && !back.has(b));
      const firsts = new Map(fresh.map(e => [e[0], e]).reverse());
      drawLinks(svg, film, at, spans ? [...firsts.values()] : fresh, place);
    },
  };

  function drawTables(svg, film, at, {now, before, first}) {
    const size = film.block_size, group = el('g', {class: 'tables'}), entries = [], busy = new Set(), {full, row, label, entry, fits} = at;
    const high = full ? 14 : row - 2, ends = new Set(events(now, 'finish', 'abort').map(e => e[2]));
    if (full) svg.append(text(0, at.top - 6, 'sequence', {class: 'dim small'}), text(label, at.top - 6,
      at.left >= 410 ? 'its logical blocks, and below each the block of the pool' : 'logical blocks; below: in the pool',
      {class: 'dim small'}));
    for (const [seq, seat, kind, start, stop] of now.rows) {
      const y = at.top + seat * row, r = film.owner(seq), table = now.tables.get(seq) ?? [], old = before.tables.get(seq) ?? [];
      busy.add(seat);
      if (seat >= at.rows) continue;
      const what = kind === 2 ? `holds ${stop}` : `writes ${start}` + (stop - start > 1 ? `–${stop - 1}` : '');
      drawName(group, film, seq, y, at, what + (ends.has(seq) ? ', ends' : ''));
      const from = clamp(Math.ceil(stop / size) - Math.floor(fits * 0.7), 0, Math.max(0, table.length - fits));
      const upto = Math.min(table.length, from + fits);
      const part = (a, b) => {                                // boxes of tokens [a, b), block by block where there is room for edges
        let d = '';
        for (let j = Math.max(from, Math.floor(a / size)); j < upto && j * size < b; j++) {
          const x = label + (j - from) * entry, left = clamp(a / size - j, 0, 1) * entry, right = clamp(b / size - j, 0, 1) * entry;
          if (table[j] >= 0) d += box(x + left, y, Math.max(0, right - left - (right === entry && entry > 4 ? 2 : 0)), high);
        }
        return d;
      };
      const all = part(0, table.length * size), most = limit(film, seq);
      group.append(path(all, {fill: colour(r), 'fill-opacity': 0.22}), path(part(0, start), {fill: colour(r), opacity: 0.55}),
        path(part(start, stop), {fill: colour(r)}), entry > 4 ? path(all, thin) : '');
      if (most < upto * size) {
        const x = label + Math.max(0, most / size - from) * entry;
        group.append(path(hatch(x, y, label + (upto - from) * entry - 2 - x, high), never));
      }
      if (from > 0) group.append(text(label - 2, y + 11, '…', right));
      if (upto < table.length) group.append(text(label + fits * entry, y + 11, '…'));
      for (let j = from; j < upto; j++) {
        const b = table[j], x = label + (j - from) * entry, changed = old[j] !== b && !first;
        const style = `font-size: 11px; font-weight: ${changed ? 600 : 400}`;
        if (full) group.append(
          rect(x + 0.5, y + 16.5, entry - 3, 14, {...b < 0 ? dashed : changed ? thick : thin, 'data-entry': `${seq} ${j} ${b}`}),
          text(x + entry / 2 - 1, y + 27.5, b < 0 ? '–' : b, {...middle, style}));
        if (changed && b >= 0) entries.push([seq, b, [x + entry / 2 - 1, y + 30.5], label + (upto - from) * entry]);
      }
    }
    drawThrown(group, film, at, now, before, busy);
    const hidden = now.rows.filter(row => row[1] >= at.rows).length;
    if (hidden) group.append(text(0, at.top + at.rows * row + 12, `and ${hidden} sequences more`, {class: 'small'}));
    svg.append(group);
    return entries;
  }

  function drawName(group, film, seq, y, at, what) {
    const name = clip(film.name(seq), at.full ? 10 : 6), r = film.owner(seq);
    if (at.full) group.append(chip(film, r, 0, y - 1, name)[0], text(0, y + 27, what, {class: 'small'}));
    else group.append(rect(0, y, 5, at.row - 2, {fill: colour(r)}),
      text(8, y + at.row / 2 + 3, name, {style: `font-size: ${at.row < 12 ? 9 : 11}px`}));
  }

  function drawThrown(group, film, at, now, before, busy) {   // what those thrown out now gave back, where they were
    const how = new Map(events(now, 'preempt').map(e => [e[1], e[3]]));
    for (const [seq, seat] of before.rows) {
      const r = film.owner(seq), y = at.top + seat * at.row;
      if (!how.has(r) || busy.has(seat) || seat >= at.rows || now.tables.has(seq)) continue;
      drawName(group, film, seq, y, at, how.get(r) === 'swap' ? 'swapped out' : 'recompute');
      group.append(path(cross(at.label - 8, y + (at.full ? 8 : at.row / 2)), {class: 'cut'}));
      if (at.full) (before.tables.get(seq) ?? []).slice(-at.fits).forEach((b, i) => group.append(
        rect(at.label + i * at.entry + 0.5, y + 16.5, at.entry - 3, 14, dashed),
        text(at.label + (i + 0.5) * at.entry - 1, y + 27.5, b < 0 ? '–' : b, {class: 'dim', ...middle, style: 'font-size: 11px'})));
    }
  }

  function drawLinks(svg, film, at, entries, place) {         // from new entries to their blocks; of many, the thick edges tell
    if (!at.full || entries.length > (at.wide ? 12 : 6)) return;
    for (const [seq, b, [x, y], edge] of entries) {            // along the row, then over to the lower left corner of the box
      const [px, py] = place(b).map((z, i) => z + (i ? 1 : -1) * (at.pool.cell / 2 - 8));
      const stroke = colour(film.owner(seq)), half = (edge + px) / 2;
      const by = at.wide ? `v4H${edge}C${half} ${y + 4} ${half} ${py}` : `C${x} ${y + 24} ${px} ${py - 44}`;
      svg.append(path(`M${x} ${y}${by} ${px} ${py}`, {fill: 'none', stroke, 'stroke-width': 1.6, 'data-link': b}),
        el('circle', {cx: px, cy: py, r: 3, fill: stroke, stroke: '#fff', 'stroke-width': 0.7}));
    }
  }

  function drawUsage(svg, usage, x, y, width) {               // slots of the pool by kind
    const scale = (width - 2) / (sum(usage) || 1);
    let at = x + 1;
    Object.values(slots).forEach((fill, i) => {
      if (usage[i]) svg.append(rect(at, y, usage[i] * scale, 10, {fill}));
      at += (usage[i] ?? 0) * scale;
    });
    svg.append(rect(x + 1.5, y + 0.5, width - 3, 9, thin));
  }

  function drawSwap(svg, film, f, at, now, place) {
    const {outs = [], ins = []} = now.frame, cpu = onCPU(film, f);
    const busy = outs.length ? `: ${outs.length} out` : ins.length ? `: ${ins.length} back` : '';
    svg.append(text(at.x, at.cpuTop + 12, title(film, at.swap, 'CPU pool') + busy, {class: 'dim small'}));
    const taken = new Set(outs.map(pair => pair[1])), given = new Set(ins.map(pair => pair[0]));
    const there = drawPool(svg, film, at.swap, at.x, at.cpuTop + 18, {...cpu, taken, given}, 'cpu');
    for (const [b, to] of outs) svg.append(...arrow(place(b), there(to), 0, {stroke: moved, 'data-out': `${b} ${to}`}));
    for (const [from, b] of ins) svg.append(...arrow(there(from), place(b), 0, {stroke: moved, 'data-in': `${from} ${b}`}));
    if (!at.lanes) return;
    const head = now.swapped.length ? 'swapped out, and its CPU blocks' : 'nobody is swapped out';
    svg.append(text(0, at.outs + 12, head, {class: 'dim small'}));
    now.swapped.slice(0, at.lanes).forEach((r, i) => {
      const y = at.outs + 18 + i * 22, more = i === at.lanes - 1 && now.swapped.length > at.lanes;
      svg.append(chip(film, r, 0, y, clip(film.requests[r].id, 10))[0]);
      if (more) svg.append(text(at.label, y + 12, `and ${now.swapped.length - i - 1} more`, {class: 'small'}));
      else if (at.entry >= 15) cpu.of(r).slice(0, at.fits).forEach((b, j) => svg.append(
        rect(at.label + j * at.entry + 0.5, y + 0.5, at.entry - 3, 14, {fill: 'none', stroke: moved}),
        text(at.label + (j + 0.5) * at.entry - 1, y + 11.5, b, {...middle, style: 'font-size: 11px'})));
      else svg.append(text(at.label, y + 12, count(cpu.of(r).length, 'CPU block'), {class: 'small'}));
    });
  }

  // ---- sharing

  function inOrder(tables) {                                  // sequences that share stand together, as in a tree of their tables
    const split = (seqs, j) => {
      const parts = new Map();
      for (const seq of seqs) {
        const key = tables.get(seq)[j] ?? `${seq} has ended`;
        parts.set(key, [...parts.get(key) ?? [], seq]);
      }
      return [...parts.values()].flatMap(part => part.length > 1 ? split(part, j + 1) : part);
    };
    return split([...tables.keys()].sort((a, b) => a - b), 0);
  }

  function sharing(film, size) {
    const k = reach(film), rows = Math.min(k.width, 64), row = clamp(Math.floor(560 / rows), 10, 34);
    const gutter = k.has.has('beams') ? 64 : k.has.has('forks') ? 16 : 0, left = gutter + (size.phone ? 46 : 64);
    const room = size.width - left - 30, column = clamp(Math.floor(room / k.longest), 26, 92);
    const fits = Math.max(2, Math.floor(room / column));
    const top = 44, bars = top + rows * row + (rows < k.width ? 16 : 0) + 10, y = bars + 46;
    const pool = grid(film.num_blocks, size.width - 2, 200, 34);
    return {rows, row, gutter, left, column, fits, top, bars, y, pool, height: y + 22 + pool.height};
  }

  views.sharing = {
    label: 'blocks that several sequences hold, drawn once',
    height: (film, size) => sharing(film, size).height,
    describe(film, f) {
      const {now, given, found, refs} = change(film, f), shared = [...now.holders].filter(([, seqs]) => seqs.length > 1);
      const saved = sum(refs) - refs.length, all = seqs => seqs.map(seq => film.name(seq)).join(', ');
      const names = seqs => seqs.length > 8 ? count(seqs.length, 'sequence') : all(seqs);
      return [`${sum(refs)} entries in ${count(now.tables.size, 'block table')}, held in ${count(refs.length, 'block')}: ${saved} saved`,
        ...shared.slice(0, 6).map(([b, seqs]) => `block ${b} is held by ${names(seqs)}`),
        ...shared.length > 6 ? [`${shared.length - 6} more are shared`] : [],
        ...[...found].map(([seq, blocks]) => `${film.name(seq)} finds ${count(blocks.length, 'block')} in the cache`),
        ...(now.frame.copies ?? []).map(([src, dst]) => `block ${src} is copied to block ${dst} before a write`),
        ...given.size ? [`held by nobody any more: ${list(given)}`] : []].join('; ') + '.';
    },
    facts(film, f) {
      const {refs, cached} = change(film, f), copied = sum(film.frames.slice(0, f + 1).map(frame => frame.copies?.length ?? 0));
      return [['table entries', sum(refs)], ['blocks that hold them', refs.length], ['saved', sum(refs) - refs.length],
        ['shared blocks', refs.filter(n => n > 1).length], ['copies so far', copied],
        ...cached ? [['cached blocks', cached, slots.cached]] : []];
    },
    legend(film) {
      const {has, grey, marks} = legendOf(film), wide = look => rect(2.5, 0.5, 21, 13, look);
      const out = [[[wide({fill: several}), text(13, 11, '×3', {...middle, style: 'fill: #fff'})], 'stored once, held by three'],
        [wide({...thin, ...grey, 'fill-opacity': 0.2}), 'held by one'],
        [[wide(thin), rect(4, 9, 10, 3, grey)], 'filled so far'], [pill(13, 7, '2'), 'reference count'], ...marks];
      if (has.has('forks')) out.push([path('M20 2h-10v10h10', thin), 'forked']);
      if (has.has('beams')) out.push([path('M2 3C13 3 13 11 24 11', thin), 'descends from'],
        [path(cross(13, 7), {class: 'cut'}), 'a beam that dies']);
      return out;
    },
    draw(svg, film, f, size) {
      const at = sharing(film, size), c = change(film, f), {now, refs} = c, order = inOrder(now.tables);
      const out = now.swapped.map(r => clip(film.requests[r].id, 9));
      const aside = out.length ? `swapped out: ${out.length > 3 ? out.length : out.join(', ')}` : '';
      theLine(svg, film, f, size.width - 6.5 * aside.length);
      svg.append(text(size.width, 12, aside, {class: 'small', ...right}));
      const side = drawBands(svg, film, at, c, order);
      drawDescent(svg, film, at, c, order);
      const scale = (size.width - 2) / Math.max(film.num_blocks, sum(refs));
      const bars = [[sum(refs), 'entries in the tables', 'none'], [refs.length, 'blocks that hold them', 'currentColor']];
      bars.forEach(([n, what, fill], i) => svg.append(
        text(0, at.bars + i * 20 + 11, `${n} ${what}`, {class: 'small'}),
        rect(0.5, at.bars + i * 20 + 14.5, n * scale, 4, {fill, stroke: 'currentColor'})));
      svg.append(text(0, at.y + 12, title(film, at.pool, 'pool') + (at.pool.cell >= 22 ? ', with reference counts' : ''),
        {class: 'dim small'}));
      const {holders, fill, cached} = now, {taken, given, hits} = c;
      const place = drawPool(svg, film, at.pool, 0, at.y + 18,
        {holders, fill, cached, taken, given, hits, counts: true, ...gone(film, f)}, 'pool');
      for (const [src, dst] of now.frame.copies ?? []) {
        const from = side.get(src) ?? place(src), to = side.get(dst) ?? place(dst);
        svg.append(...arrow(from, to, from[1] < to[1] ? -0.35 : 0.35, {...broken, 'data-copy': `${src} ${dst}`}));
      }
    },
  };

  function drawBands(svg, film, at, c, order) {               // returns block -> a point on its right side
    const {now} = c, {row, column, top, left} = at, bands = el('g', {class: 'bands'}), over = el('g'), side = new Map();
    const shown = order.slice(0, at.rows), ends = new Set(events(now, 'finish', 'abort').map(e => e[2]));
    const longest = Math.max(0, ...shown.map(seq => now.tables.get(seq).length)), skip = Math.max(0, longest - at.fits);
    const x = j => left + (j ? j - skip : 0) * column, what = skip ? `logical blocks: 0, and from ${skip + 1} on` : 'logical blocks';
    svg.append(text(left, top - 8, what, {class: 'dim small'}), bands, over);
    shown.forEach((seq, i) => {
      const y = top + i * row, name = clip(film.name(seq), 7);
      if (row >= 18) over.append(chip(film, film.owner(seq), at.gutter, y + row / 2 - 10, name)[0]);
      else over.append(rect(at.gutter, y, 6, row - 3, {fill: colour(film.owner(seq))}),
        text(at.gutter + 9, y + row / 2 + 2, name, {style: `font-size: ${row < 12 ? 9 : 11}px`}));
      if (ends.has(seq)) over.append(text(x(now.tables.get(seq).length) + 2, y + row / 2 + 3, 'ends', {class: 'small'}));
    });
    for (let j = 0; j < longest; j += j || !skip ? 1 : skip + 1)
      for (let i = 0, first; (first = i) < shown.length;) {
        const b = now.tables.get(shown[i])[j];
        while (i < shown.length && now.tables.get(shown[i])[j] === b) i++;
        if (b >= 0) side.set(b, drawBand(bands, over, film, c, b, shown.slice(first, i), x(j), top + first * row, at));
      }
    const hidden = order.length - shown.length;
    if (hidden) over.append(text(0, top + at.rows * row + 12, `and ${hidden} sequences more`, {class: 'small'}));
    return side;
  }

  function drawBand(bands, over, film, {now, taken, found}, b, seqs, x, y, {row, column}) {
    const w = column - 3, h = seqs.length * row - 3, holders = now.holders.get(b), refs = holders.length, who = owners(film, holders);
    const [hue, contrast] = who.length > 1 ? [several, '#fff'] : [colour(who[0]), ink(who[0])], on = refs > 1 ? contrast : 'currentColor';
    const notch = w < 40 ? 2 : 5, tokens = now.fill.get(b), two = refs > 1 && h >= 30;
    const look = {fill: hue, 'fill-opacity': refs > 1 ? 1 : 0.25};
    bands.append(rect(x + 0.5, y + 0.5, w - 1, h - 1,
      {...taken.has(b) ? thick : thin, ...look, 'data-block': b, 'data-refs': refs, 'data-fill': tokens}));
    if (who.length > 1) seqs.forEach((seq, i) => bands.append(rect(x, y + i * row, 5, row - 3, {fill: colour(film.owner(seq))})));
    if (tokens < film.block_size)
      bands.append(rect(x + 4, y + h - 5, (w - 8) * tokens / film.block_size, 3, {fill: refs > 1 ? on : hue}));
    const edges = seqs.slice(1).map((_, i) => `M${x} ${y + (i + 1) * row - 1.5}h${notch}m${w - 2 * notch} 0h${notch}`).join('');
    if (edges) bands.append(path(edges, {fill: 'none', stroke: on}));
    const mid = y + h / 2 + 4, put = (y, label, weight) => over.append(text(x + w / 2, y, label,
      {...middle, style: `fill: ${on}; font-weight: ${weight}; font-size: ${h < 12 ? 9 : w < 36 ? 10 : 12}px`}));
    if (two) { put(mid - 7, b, 400); put(mid + 8, w >= 84 ? `held by ${refs}` : `×${refs}`, 600); }
    else if (h >= 9) put(h < 12 ? mid - 1 : mid, refs > 1 && w >= 44 ? `${b} ×${refs}` : b, 400);
    seqs.forEach((seq, i) => {
      if (found.get(seq)?.includes(b)) over.append(path(tick(x + w - 9, y + (i + 0.5) * row - 1), {...thick, stroke: on}));
    });
    return [x + w, y + h / 2];
  }

  function drawDescent(svg, film, at, {now, before}, order) { // left of the names: forks, and the beam of which each beam is a child
    const {beams = [], forks = []} = now.frame, old = inOrder(before.tables);
    const y = (seqs, seq) => at.top + (seqs.indexOf(seq) + 0.5) * at.row - 1;
    const shown = (seqs, seq) => { const i = seqs.indexOf(seq); return i >= 0 && i < at.rows; };
    for (const [parent, child] of forks)
      if (shown(order, parent) && shown(order, child))
        svg.append(path(`M${at.gutter - 2} ${y(order, parent)}h-9V${y(order, child)}h9`, {...thin, 'data-fork': `${parent} ${child}`}));
    if (!beams.length) return;
    const parents = new Set(beams.map(beam => beam[0])), children = new Set(beams.map(beam => beam[1]));
    svg.append(text(0, at.top - 8, 'from', {class: 'dim small'}));
    for (const seq of old) {
      if (!shown(old, seq) || !parents.has(seq) && !children.has(seq) && now.tables.has(seq)) continue;
      svg.append(text(0, y(old, seq) + 4, `.${film.seqs[seq].index}`, {class: 'small'}));
      if (!parents.has(seq)) svg.append(path(cross(22, y(old, seq)), {class: 'cut'}));
    }
    for (const [parent, child] of beams) if (shown(old, parent) && shown(order, child)) {
      const a = y(old, parent), b = y(order, child);
      svg.append(path(`M17 ${a}C38 ${a} 38 ${b} ${at.gutter - 4} ${b}`, {...thin, 'stroke-width': 1.5, 'data-beam': `${parent} ${child}`}));
    }
  }
})();
