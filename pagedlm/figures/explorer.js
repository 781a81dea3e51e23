// The explorer's view, as anywidget has it: the film comes with the model, and then a part of it after each step.
// Player.js stands before it.
//
//   model: film (with `run`, the number of the engine that it is of), view, keep
//   messages in: {run, after, requests, seqs, frames}, after: the last iteration before these; out: {want: 'film'}

function whole(film) {                                        // a film's data; nothing that its first frame needs has been forgotten
  if (!film.frames.length) return {requests: film.requests, seqs: film.seqs, frames: []};
  const {tables, swap, cached, rounded, spare} = film.state(0);
  const first = {...film.frames[0], cached: {add: [...cached]}, gone: film.frames[0].gone ?? {rounded, spare}};
  for (const [name, map] of Object.entries({tables, swap})) first[name] = Object.fromEntries(map);
  return {requests: film.requests, seqs: film.seqs, frames: [first, ...film.frames.slice(1)]};
}

const follows = (film, part) => part.run === film.run && part.after === (film.frames.at(-1)?.i ?? null);

export default {
  initialize({model}) {                                       // the model's own film grows too: for views made later, and saved notebooks
    let data, film;
    model.on('msg:custom', part => {
      if (data !== model.get('film')) film = new pagedlm.Film(data = model.get('film'));
      if (!follows(film, part)) return model.send({want: 'film'});
      film.append(part);
      film.drop(film.frames.length - model.get('keep'));
      Object.assign(data, whole(film));
    });
  },
  render({model, el}) {
    const root = el.appendChild(document.createElement('div'));
    let player = null;
    const draw = () => {
      player?.destroy();
      player = pagedlm.mount(root, [model.get('film')], {view: model.get('view')});
      player.show(Infinity);
    };
    const grow = part => { if (follows(player.films[0], part)) player.append(part, model.get('keep')); };
    model.on('change:film change:view', draw);
    model.on('msg:custom', grow);
    draw();
    return () => { model.off('change:film change:view', draw); model.off('msg:custom', grow); player.destroy(); };
  },
};
