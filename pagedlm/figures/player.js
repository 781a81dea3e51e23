// Films of an engine, drawn iteration by iteration. One object, `pagedlm`; no imports, nothing is fetched.
//
// A film is what pagedlm.figures.frames.film(trace).to_dict() holds. A view draws one iteration of it:
//
//   pagedlm.views.name = {
//     label,                        what the view shows, in a few words
//     height(film, box),            of the picture, in px; the same for every iteration, so that the page does not jump
//     draw(svg, film, f, box),      put elements into the empty `svg`; f: index of a frame, 0 <= f < film.frames.length
//     describe(film, f),            optional: a sentence for screen readers (else the frame's `said`)
//     facts(film, f),               optional: numbers below the picture, [name, value, colour or nothing] each
//     legend(film),                 optional: [SVG elements within 26 x 14 px, name] each
//   }
//   box = {width, phone, length, tokens}             px; width < 520; and of all films side by side, which have one scale: frames, and
//                                                    tokens per iteration, at most
//
//   film.block_size, .requests, .seqs, .frames ...   as in the data, see figures.frames
//   film.state(f) -> {tables: Map seq -> [block or -1], swap: Map seq -> [CPU block], cached: Set of blocks, rounded, spare: [block],
//                     holders: Map block -> [seq], fill: Map block -> tokens, frame, rows, waiting, swapped}; do not change it
//   film.name(seq), film.owner(seq)                  "b" or, of more samples than one, "b.0"; its index in film.requests
//   film.sums[f]                                     {due, idle}: tokens generated and seats idle in frames [0, f]
//
//   pagedlm.el(name, attrs, ...children)             an SVG element; children: elements, strings, lists of them
//   pagedlm.text(x, y, string, attrs)                SVG text; class "dim" is paler, "small" smaller
//   pagedlm.colour(request), pagedlm.ink(request)    fill, and a colour for text on it; by index in film.requests
//   pagedlm.slots                                    colours of used, reserved, internal, external and cached slots
//   pagedlm.poolFacts(frame)                         facts: the slots of the pool after the iteration, by kind
//   pagedlm.hatch(x, y, w, h, gap)                   path data of diagonals inside a box
//   pagedlm.chip(film, request, x, y, label, style)  a small box with a name in it; returns [element, width]
//   classes for shapes: line (thin stroke), idle (hollow), now (pale band), cut (preempted, red), and text: dim, small, strong
//
//   pagedlm.mount(element, [film data ...], {view, autoplay, speed, title}) ->
//     {films, show(f), play(), pause(), append({requests, seqs, frames}, keep, which), destroy()}
const pagedlm = (() => {
  const hues = ['#44AA99', '#AA4499', '#C2A83E', '#6677CC', '#5CB8E4', '#CC6677'];          // figures.batch.hues
  const slots = {used: '#0072B2', reserved: '#E69F00', internal: '#D55E00', external: '#CC79A7', cached: '#56B4E9'};
  const views = {}, speeds = [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256];
  const ran = frame => frame.rows.filter(row => row[2] < 2);         // rows that compute something
  const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
  const tokens = row => row[4] - row[3];
  const sum = numbers => numbers.reduce((a, b) => a + b, 0);

  // ---- elements

  function make(element, attrs, children) {
    for (const [k, v] of Object.entries(attrs ?? {})) element.setAttribute(k, v);
    element.append(...children.flat(Infinity));
    return element;
  }
  const el = (name, attrs, ...children) => make(document.createElementNS('http://www.w3.org/2000/svg', name), attrs, children);
  const html = (name, attrs, ...children) => make(document.createElement(name), attrs, children);
  const text = (x, y, string, attrs) => el('text', {x, y, ...attrs}, String(string));
  const colour = request => hues[request % hues.length];
  const ink = request => request % hues.length === 1 ? '#fff' : '#000';
  const box = (x, y, w, h) => `M${x} ${y}h${w}v${h}h${-w}z`;

  function hatch(x, y, w, h, gap = 4) {
    let d = '';
    for (let c = gap / 2; c < w + h; c += gap)
      d += `M${x + Math.max(0, c - h)} ${y + Math.min(c, h)}L${x + Math.min(c, w)} ${y + Math.max(0, c - w)}`;
    return d;
  }

  function chip(film, request, x, y, label, style = {}) {
    const width = 8 + 6.5 * label.length;
    return [el('g', {}, el('rect', {x, y, width, height: 16, rx: 3, fill: colour(request), ...style}),
      text(x + width / 2, y + 12, label, {'text-anchor': 'middle', style: `fill: ${ink(request)}`})), width];
  }

  // ---- films

  const every = 64;                                           // frames between two stored states
  const copy = s => ({tables: new Map(s.tables), swap: new Map(s.swap), cached: new Set(s.cached), rounded: s.rounded, spare: s.spare});

  function apply(s, frame) {                                  // tables themselves are shared between states
    for (const name of ['tables', 'swap'])
      for (const [seq, table] of Object.entries(frame[name] ?? {})) table ? s[name].set(+seq, table) : s[name].delete(+seq);
    for (const b of frame.cached?.drop ?? []) s.cached.delete(b);
    for (const b of frame.cached?.add ?? []) s.cached.add(b);
    if (frame.gone) Object.assign(s, {rounded: frame.gone.rounded ?? [], spare: frame.gone.spare ?? []});
    return s;
  }

  const goOn = rows => rows.map(([seq, seat, kind, start, stop]) =>
    kind === 1 ? [seq, seat, 1, stop, stop + 1] : [seq, seat, kind, start, stop]);

  class State {
    constructor(film, f, s) {
      const frame = film.frames[f];
      Object.assign(this, s, {film, f, frame, rows: frame.rows, waiting: frame.waiting ?? [], swapped: frame.swapped ?? []});
    }
    get holders() { return this._holders ??= this.perBlock((held, seq) => [...held ?? [], seq]); }
    get fill() {
      const size = this.film.block_size, stops = new Map(this.rows.map(([seq, , , , stop]) => [seq, stop]));
      return this._fill ??= this.perBlock((most, seq, j) => Math.max(most ?? 0, clamp((stops.get(seq) ?? 0) - j * size, 0, size)));
    }
    perBlock(merge) {
      const out = new Map();
      for (const [seq, table] of this.tables) table.forEach((b, j) => { if (b >= 0) out.set(b, merge(out.get(b), seq, j)); });
      return out;
    }
  }

  class Film {
    constructor(data) {
      Object.assign(this, data, {requests: [], seqs: [], frames: [], sums: []});
      this.keys = [{tables: new Map(), swap: new Map(), cached: new Set(), rounded: [], spare: []}];   // keys[k]: before frame k * every
      this.most = {waiting: 0, tokens: 1, seats: 1};
      this.last = null;                                       // the state that was asked for last
      this.seen = new Map();                                  // request -> [iteration in which it was first seen, and first ran]
      this.append(data);
    }
    append({requests = [], seqs = [], frames = []}) {
      for (const r of requests) this.requests[r.number ?? this.requests.length] = r;         // told again when more is known
      this.seqs.push(...seqs);
      for (const told of frames) {
        const rows = told.rows ?? goOn(this.frames.at(-1)?.rows ?? []), frame = {...told, rows};
        const busy = ran(frame), line = [...frame.waiting ?? [], ...frame.swapped ?? []];
        const {due, idle} = this.sums.at(-1) ?? {due: 0, idle: 0};
        for (const r of line) if (!this.seen.has(r)) this.seen.set(r, [frame.i]);
        for (const [seq] of busy) {
          if (!this.seen.has(this.owner(seq))) this.seen.set(this.owner(seq), [frame.i]);
          this.seen.get(this.owner(seq))[1] ??= frame.i;
        }
        this.frames.push(frame);
        this.sums.push({due: due + (frame.due ?? 0), idle: idle + this.max_num_seqs - busy.length});
        this.most.waiting = Math.max(this.most.waiting, line.length);
        this.most.tokens = Math.max(this.most.tokens, sum(busy.map(tokens)));
        this.most.seats = Math.max(this.most.seats, ...rows.map(row => row[1] + 1));
      }
    }
    drop(n) {                                                 // forget the first n frames; what they left behind stays
      if (n <= 0) return;
      const before = copy(this.state(n - 1));
      this.frames.splice(0, n);
      this.sums.splice(0, n);
      this.keys = [before];
      this.last = null;
    }
    state(f) {
      if (this.last?.f === f) return this.last;
      const k = Math.floor(f / every);
      while (this.keys.length <= k) {
        const s = copy(this.keys.at(-1)), at = this.keys.length * every;
        for (let i = at - every; i < at; i++) apply(s, this.frames[i]);
        this.keys.push(s);
      }
      const near = this.last && this.last.f < f && this.last.f >= k * every;
      const s = copy(near ? this.last : this.keys[k]);
      for (let i = near ? this.last.f + 1 : k * every; i <= f; i++) apply(s, this.frames[i]);
      return this.last = new State(this, f, s);
    }
    owner(seq) { return this.seqs[seq].request; }
    name(seq) {
      const {request, index} = this.seqs[seq], {id, samples} = this.requests[request];
      return samples > 1 ? `${id}.${index}` : id;
    }
  }

  function poolFacts({usage = []}) {                          // facts of the pool as an iteration leaves it
    if (!usage.length) return [];
    return [['after it:', ''], ...Object.entries(slots).flatMap(([kind, hue], i) => usage[i] ? [[`${kind} slots`, usage[i], hue]] : []),
      ['free slots', usage[5], 'none']];
  }

  // ---- the batch: the line above, seats below, a column per iteration

  const tall = 0.84, low = 0.42, kinds = ['prefill', 'decode', 'held'];

  function layout(film, size) {
    const seats = Math.max(film.most.seats, film.max_num_seqs <= 16 ? film.max_num_seqs : 1), lanes = Math.min(6, film.most.waiting);
    const row = clamp(Math.floor(440 / (seats + lanes)), 3, 22), left = 22, right = row < 12 ? 24 : size.phone ? 104 : 190;
    const cell = clamp((size.width - left - right) / Math.max(size.length, 1), 8, 24);
    const line = 18, seat = line + lanes * row + (lanes ? 22 : 0), axis = seat + seats * row, bars = axis + 34;
    const columns = Math.max(1, Math.floor((size.width - left - right) / cell));
    return {seats, lanes, row, left, cell, line, seat, axis, bars, columns, height: bars + 52};
  }

  views.batch = {
    label: 'the line of waiting requests, the seats of the batch, and a column per iteration',
    height: (film, size) => layout(film, size).height,
    describe(film, f) {
      const frame = film.frames[f];
      return `${frame.said ?? ''} ${ran(frame).length} of ${film.max_num_seqs} seats compute something.`;
    },
    facts(film, f) {
      const {due, idle} = film.sums[f], {waiting = [], swapped = []} = film.frames[f];
      return [['tokens so far', due], ['idle seats so far', `${idle} of ${(f + 1) * film.max_num_seqs}`],
        ['waiting', waiting.length + swapped.length], ...poolFacts(film.frames[f])];
    },
    legend() {
      const shape = (d, attrs) => el('path', {d, ...attrs}), grey = opacity => ({fill: 'currentColor', opacity}), hollow = {class: 'idle'};
      return [[shape(box(4, 1, 18, 12), grey(0.55)), 'prompt'], [shape(box(4, 4, 18, 6), grey(0.55)), 'decode'],
        [shape(box(4.5, 3.5, 17, 6), hollow), 'idle seat'],
        [[shape(box(4, 4, 18, 6), grey(0.25)), shape(box(4.5, 4.5, 17, 6), hollow)], 'idle, and holds memory'],
        [[shape(box(4, 1, 18, 12), grey(0.15)), shape(hatch(4, 1, 18, 12), {class: 'line'})], 'waiting'],
        [shape('M13 1v12', {class: 'end'}), 'finished'], [shape(cross(13, 7), {class: 'cut'}), 'preempted'],
        [shape(dagger(13, 7), {class: 'dagger'}), 'aborted']];
    },
    draw(svg, film, f, size) {
      const at = layout(film, size), first = Math.max(0, f + 1 - at.columns), x = i => at.left + (i - first) * at.cell;
      svg.append(el('path', {class: 'now', d: box(x(f), at.line - 4, at.cell, at.axis - at.line + 8)}),
        text(0, 11, at.lanes ? 'the line, its head lowest' : 'nobody waits', {class: 'dim small'}),
        at.lanes ? text(0, at.seat - 5, 'seats', {class: 'dim small'}) : '');
      drawCells(svg, film, first, f, at, x);
      if (at.row >= 12) drawNow(svg, film, f, at, x(f + 1) + 6, size.phone);
      for (let i = first; i <= f; i++) {
        const {i: iteration} = film.frames[i], clear = Math.abs(i - f) * at.cell > 18;
        if (i === f || clear && iteration % (at.cell < 14 ? 10 : 5) === 0)
          svg.append(text(x(i) + at.cell / 2, at.axis + 14, iteration, {'text-anchor': 'middle', class: i === f ? 'small' : 'dim small'}));
      }
      drawBars(svg, film, f, at, size);
    },
  };

  const cross = (x, y, r = 4) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;
  const dagger = (x, y) => `M${x} ${y - 6}v12m-3.5 -8.5h7`;

  function drawCells(svg, film, first, f, at, x) {            // one path for all boxes of a kind and a colour
    const paths = {}, name = (kind, request) => kind + (request === null ? '' : colour(request));
    const add = (kind, request, d) => (paths[name(kind, request)] ??= [kind, request, []])[2].push(d);
    const w = at.cell - (at.cell > 6 ? 1.5 : 0), top = (y, share) => y + at.row * (1 - share) / 2;
    const cell = (i, y, share) => box(x(i), top(y, share), w, at.row * share);
    const line = frame => [...frame.swapped ?? [], ...frame.waiting ?? []].slice(0, at.lanes);
    const lane = p => at.line + (at.lanes - 1 - p) * at.row;
    for (let i = first; i <= f; i++) {
      const frame = film.frames[i], {rows} = frame, busy = new Set(ran(frame).map(row => row[1]));
      line(frame).forEach((r, p) => {
        add('waiting', r, cell(i, lane(p), tall));
        if (at.row >= 8) add('hatch', r, hatch(x(i), top(lane(p), tall), w, at.row * tall, 5));
      });
      for (const [seq, seat, kind] of rows) add(kinds[kind], film.owner(seq), cell(i, at.seat + seat * at.row, kind ? low : tall));
      for (let seat = 0; seat < at.seats; seat++) if (!busy.has(seat)) add('idle', null, cell(i, at.seat + seat * at.row, low));
      for (const [kind, r, seq] of frame.events ?? []) {
        const seat = rows.find(row => row[0] === seq)?.[1], y = at.seat + seat * at.row;
        if (kind === 'finish' && seat !== undefined) add('end', null, `M${x(i) + w} ${top(y, tall)}v${at.row * tall}`);
        if (i === first || kind !== 'preempt' && kind !== 'abort') continue;
        const before = film.frames[i - 1], p = line(before).indexOf(r), middle = y => y + at.row / 2;      // where it was until now
        const mark = y => kind === 'abort' ? add('dagger', null, dagger(x(i), middle(y))) : add('cut', null, cross(x(i), middle(y)));
        for (const [s, seat] of before.rows)
          if (s === seq || film.owner(s) === r && (kind === 'preempt' || seq < 0)) mark(at.seat + seat * at.row);
        if (kind === 'abort' && p >= 0) mark(lane(p));
      }
    }
    const pale = {opacity: 0.3};
    const look = {prefill: {}, decode: {}, held: pale, waiting: pale, hatch: {}, idle: {}, end: {}, cut: {}, dagger: {}};
    for (const kind of Object.keys(look))
      for (const [k, r, d] of Object.values(paths))
        if (k === kind) svg.append(el('path', {d: d.join(''), class: kind, ...look[kind],
          ...r === null ? {} : {[kind === 'hatch' ? 'stroke' : 'fill']: colour(r)}}));
  }

  function drawNow(svg, film, f, at, x, phone) {              // who is where in this iteration, right of its column
    const {rows, waiting, swapped, frame} = film.state(f), said = {};
    const put = (y, request, label, what, then = '') => {
      const [mark, width] = chip(film, request, x, y + (at.row - 16) / 2, label.length > 8 ? label.slice(0, 7) + '…' : label);
      svg.append(mark, el('text', {x: x + width + 5, y: y + at.row / 2 + 4, class: 'small'}, what, el('tspan', {class: 'strong'}, then)));
    };
    for (const [kind, r, seq, detail] of frame.events ?? []) (said[seq >= 0 ? `s${seq}` : `r${r}`] ??= {})[kind] = detail || true;
    const line = [...swapped, ...waiting];
    line.slice(0, at.lanes).forEach((r, p) => {
      const [seen, began] = film.seen.get(r), hidden = line.length - at.lanes;
      const what = p < swapped.length ? 'swapped out' : began < frame.i ? 'thrown out'
        : seen === frame.i ? 'arrives' : `waits ${frame.i - seen}`;
      const more = hidden > 0 && p === at.lanes - 1 ? `and ${hidden} more` : '';
      const head = r === waiting[0] && !phone ? ', head of the line' : '';
      put(at.line + (at.lanes - 1 - p) * at.row, r, film.requests[r].id, more || what + head);
    });
    const taken = new Set();
    for (const [seq, seat, kind, start, stop] of rows) {
      const r = film.owner(seq), {prompt} = film.requests[r], mine = {...said[`r${r}`], ...said[`s${seq}`]};
      const what = kind === 2 ? idle(film, f, seat, phone) + (phone ? '' : ', holds memory') : kind === 1 ? `token ${stop - prompt + 1}`
        : `${phone ? '' : 'prompt '}${start}–${stop} of ${Math.max(prompt, stop)}`;
      const then = mine.finish || mine.abort ? ', ends' : phone ? '' : mine.admit ? ', admitted' : mine.resume ? ', is back' : '';
      taken.add(seat);
      put(at.seat + seat * at.row, r, film.name(seq), what, then);
    }
    for (let seat = 0; seat < at.seats; seat++)
      if (!taken.has(seat)) svg.append(text(x, at.seat + (seat + 0.5) * at.row + 4, idle(film, f, seat, phone), {class: 'dim small'}));
  }

  function idle(film, f, seat, phone) {                       // for how many iterations has this seat computed nothing?
    let since = f;
    while (since > 0 && f - since < 200 && !ran(film.frames[since - 1]).some(row => row[1] === seat)) since--;
    return `idle ${phone ? '' : 'for '}${f - since < 200 ? f - since + 1 : '200 and more'}`;
  }

  function drawBars(svg, film, f, at, size) {                 // the flattened batch, and the pool by kind of slot
    const frame = film.frames[f], busy = ran(frame), width = size.width - 2, scale = width / size.tokens;
    const prompts = sum(busy.filter(row => !row[2]).map(tokens)), decodes = sum(busy.map(tokens)) - prompts;
    svg.append(text(0, at.bars, `tokens computed in this iteration: ${prompts} of prompts, ${decodes} to decode`, {class: 'dim small'}));
    let x = 0;
    for (const row of busy) {
      const width = Math.max(0.5, tokens(row) * scale - 1);
      svg.append(el('rect', {x, y: at.bars + 5, width, height: 9, fill: colour(film.owner(row[0]))}));
      x += tokens(row) * scale;
    }
    const usage = frame.usage ?? [], total = sum(usage);
    if (!total) return;
    svg.append(text(0, at.bars + 32, 'the pool after it, slots by kind', {class: 'dim small'}),
      el('rect', {x: 0.5, y: at.bars + 37.5, width, height: 10, class: 'line'}));
    x = 0.5;
    Object.values(slots).forEach((fill, i) => {
      if (usage[i]) svg.append(el('rect', {x, y: at.bars + 37.5, width: usage[i] / total * width, height: 10, fill}));
      x += usage[i] / total * width;
    });
  }

  // ---- the player

  const icons = {first: 'M3 3v10M13 3L6 8l7 5z', back: 'M11 3L4 8l7 5z', play: 'M4 3l9 5-9 5z', pause: 'M5 3v10M11 3v10',
    next: 'M5 3l7 5-7 5z', last: 'M13 3v10M3 3l7 5-7 5z', slower: 'M3 8h10', faster: 'M3 8h10M8 3v10'};

  function button(icon, label, key, onclick) {
    const path = el('path', {}), b = html('button', {type: 'button'}, el('svg', {viewBox: '0 0 16 16', 'aria-hidden': 'true'}, path));
    b.look = (icon, label) => {
      b.ariaLabel = label;
      b.title = `${label} (${key})`;
      path.setAttribute('d', icons[icon]);
    };
    b.look(icon, label);
    b.onclick = onclick;
    return b;
  }

  const write = (node, words) => { if (node.textContent !== words) node.textContent = words; };       // nothing is read out twice

  function mount(root, data, {view = 'batch', autoplay = false, speed = 4, title = ''} = {}) {
    const films = data.map(d => new Film(d)), show = views[view];
    let at = 0, timer = null, width = 0;
    const length = () => Math.max(...films.map(film => film.frames.length));

    const panels = films.map(film => {
      const svg = el('svg', {role: 'img'}), said = html('div', {class: 'said', 'aria-live': 'polite'});
      const facts = html('div', {class: 'facts'}), name = film.title ? html('div', {class: 'name'}, film.title) : [];
      return {film, svg, said, facts, node: html('div', {}, name, svg, said, facts)};
    });
    const playing = () => timer !== null;
    const playButton = button('play', 'Play', 'space', () => playing() ? pause() : play());
    const scrubber = html('input', {type: 'range', min: 0, step: 1, 'aria-label': 'Iteration'}), where = html('span', {class: 'where'});
    const rate = html('output', {class: 'rate', title: 'iterations per second'});
    const controls = html('div', {class: 'controls', role: 'group', 'aria-label': 'Player'},
      html('span', {}, button('first', 'First iteration', 'Home', () => jump(0)), button('back', 'Step back', '←', () => jump(at - 1)),
        playButton, button('next', 'Step forward', '→', () => jump(at + 1)),
        button('last', 'Last iteration', 'End', () => jump(length() - 1))),
      html('span', {}, button('slower', 'Slower', '−', () => change(-1)), rate, button('faster', 'Faster', '+', () => change(1))),
      scrubber, where);
    const entries = new Map(films.flatMap(film => show.legend?.(film) ?? []).map(([swatch, name]) => [name, swatch]));
    const legend = html('div', {class: 'legend'}, [...entries].map(([name, swatch]) =>
      html('span', {}, el('svg', {width: 26, height: 14, 'aria-hidden': 'true'}, swatch), name)));
    root.classList.add('pagedlm');
    root.dataset.lmSuppressShortcuts = 'true';                // JupyterLab keeps its keys to itself
    root.role = 'group';
    root.ariaLabel = `Player: ${title || films.map(film => film.title).join(', ')}`;
    root.tabIndex = -1;                                       // a click on the picture is enough for the keys to work
    root.replaceChildren(...title ? [html('div', {class: 'title'}, title)] : [], controls,
      html('div', {class: 'films'}, panels.map(p => p.node)), legend);

    function draw() {
      for (const {film, svg, said, facts, node} of panels) {
        const f = Math.min(at, film.frames.length - 1), w = node.clientWidth;
        if (f < 0 || !w) continue;
        const frame = film.frames[f], tokens = Math.max(...films.map(x => x.most.tokens));
        const size = {width: w, phone: w < 520, length: length(), tokens};
        const height = show.height(film, size);
        for (const [k, v] of Object.entries({width: w, height, viewBox: `0 0 ${w} ${height}`})) svg.setAttribute(k, v);
        svg.replaceChildren();
        show.draw(svg, film, f, size);
        svg.ariaLabel = `${film.title ? film.title + ', ' : ''}iteration ${frame.i}: ${show.describe?.(film, f) ?? frame.said ?? ''}`;
        said.ariaLive = playing() ? 'off' : 'polite';
        write(said, at > f ? `It has ended. ${frame.said ?? ''}` : frame.said ?? '');
        facts.replaceChildren(...(show.facts?.(film, f) ?? []).map(([name, value, hue]) => html('span', {},
          hue ? html('i', {style: hue === 'none' ? 'box-shadow: inset 0 0 0 1px currentColor' : `background: ${hue}`}) : [],
          `${name} `, html('b', {}, String(value)))));
      }
      const longest = films.find(film => film.frames.length === length()), now = longest.frames[at]?.i ?? 0;
      scrubber.max = Math.max(0, length() - 1);
      scrubber.value = at;
      scrubber.style.setProperty('--done', `${100 * at / Math.max(1, length() - 1)}%`);
      scrubber.ariaValueText = `iteration ${now} of ${longest.frames.at(-1)?.i ?? 0}`;
      write(where, scrubber.ariaValueText);
      write(rate, `${speed} / s`);
      playButton.look(playing() ? 'pause' : 'play', playing() ? 'Pause' : 'Play');
    }
    function go(f) { at = clamp(f, 0, Math.max(0, length() - 1)); draw(); }
    function jump(f) { halt(); go(f); }
    function halt() { clearInterval(timer); timer = null; }
    function tick() {
      const by = Math.max(1, Math.round(speed / 32));         // above 32 per second frames are skipped, not hurried
      if (at + by >= length() - 1) jump(length() - 1); else go(at + by);
    }
    function play() {
      if (at >= length() - 1) at = 0;
      clearInterval(timer);
      timer = setInterval(tick, 1000 * Math.max(1, Math.round(speed / 32)) / speed);
      draw();
    }
    function pause() { halt(); draw(); }
    function change(by) {
      const k = speeds.findIndex(s => s >= speed);
      speed = speeds[clamp((k < 0 ? speeds.length : k) + by, 0, speeds.length - 1)];
      playing() ? play() : draw();
    }

    scrubber.oninput = () => jump(+scrubber.value);
    root.onkeydown = e => {
      const act = {' ': () => playing() ? pause() : play(), ArrowRight: () => jump(at + 1), ArrowLeft: () => jump(at - 1),
        Home: () => jump(0), End: () => jump(length() - 1), '+': () => change(1), '=': () => change(1), '-': () => change(-1)}[e.key];
      if (!act || e.ctrlKey || e.metaKey || e.altKey || e.key === ' ' && e.target.tagName === 'BUTTON') return;
      e.preventDefault();
      e.stopPropagation();
      act();
    };
    const resized = new ResizeObserver(() => { if (width !== root.clientWidth) { width = root.clientWidth; draw(); } });
    resized.observe(root);
    const seen = new IntersectionObserver(entries => {
      if (entries.some(e => e.isIntersecting)) { seen.disconnect(); play(); }
    }, {threshold: 0.3});
    if (autoplay && !matchMedia('(prefers-reduced-motion: reduce)').matches) seen.observe(root);
    draw();

    return {
      films, play, pause, show: jump,
      append(part, keep = Infinity, which = 0) {
        const film = films[which], follow = at >= length() - 1, extra = film.frames.length + (part.frames ?? []).length - keep;
        film.append(part);
        film.drop(extra);
        at = follow ? length() - 1 : at - Math.max(0, extra);
        go(at);
      },
      destroy() { halt(); resized.disconnect(); seen.disconnect(); root.onkeydown = null; root.replaceChildren(); },
    };
  }

  return {views, hues, slots, el, html, text, colour, ink, box, hatch, chip, cross, poolFacts, Film, mount};
})();
