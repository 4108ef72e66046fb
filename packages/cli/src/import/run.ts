/** `holdfast import`: what is there, whether it is meant, and what became of it. */
import { setTimeout as sleep } from "node:timers/promises";
import { SingleBar } from "cli-progress";
import { Failure, exitCodes, interruptible } from "../failure.ts";
import { type ChangeOptions, change } from "../patterns/change.ts";
import { onServer } from "../patterns/place.ts";
import { cell, printTable, quoted } from "../patterns/show.ts";
import type { Server } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { listed, plural, shown } from "../text.ts";
import { graphileWorker } from "./graphile-worker.ts";
import { type Moved, type Route, move, totalOf } from "./move.ts";
import { type Found, type Peer, type Standing } from "./peer.ts";
import { pgBoss } from "./pg-boss.ts";

export const peers: Readonly<Record<string, Peer>> = {
  "pg-boss": pgBoss,
  "graphile-worker": graphileWorker,
};

export interface ImportOptions extends ChangeOptions {
  readonly peerSchema?: string;
  readonly queue?: readonly string[];
  readonly dryRun?: true;
  /** Seconds. */
  readonly wait?: number;
  /** Seconds. */
  readonly deadline: number;
}

/** How often it looks whether a worker of theirs has ended what it had. */
const pollMs = 500;

const movable = ({ waiting, scheduled, retrying }: Standing): number => waiting + scheduled + retrying;

export async function runImport(name: string, options: ImportOptions): Promise<void> {
  const peer = peers[name];
  if (!peer)
    throw new Failure(
      `Jobs of ${quoted(name)} cannot be moved: ${Object.keys(peers).join(" and ")} are known.`,
    );
  using stop = interruptible();
  const how = {
    kinds: ["postgres"],
    instead: `The tables of ${peer.name} are in PostgreSQL, and jobs are moved within a database.`,
  } as const;
  await onServer(
    "import",
    options,
    async (server) => {
      const schema = options.peerSchema ?? peer.schema;
      const found = await peer.examine(server.query, schema);
      const routes = routesOf(options.queue, found, peer);
      const chosen = routes.map(({ from }) => found.queues.find((each) => each.name === from) as Standing);
      if (!options.json) show(chosen, routes, found, options.dryRun);
      const all = chosen.reduce((sum, each) => sum + movable(each), 0);
      const active = chosen.reduce((sum, each) => sum + each.active, 0);
      if (options.dryRun) {
        if (options.json) printJson({ peer: peer.name, schema, ...planOf(found, chosen, routes) });
        else note("Nothing was moved: --dry-run.");
        return;
      }
      if (all === 0 && (active === 0 || options.wait === undefined)) {
        if (options.json) printJson(resultOf(peer, schema, [], chosen, found));
        else print("There is nothing to move.");
        return;
      }
      const to = new Set(routes.map((route) => route.to));
      const done = await change(
        server,
        {
          question: `Move ${plural(all, "job")} from ${peer.name} (${shown(schema)}) to ${to.size === 1 ? `the queue ${quoted([...to][0] ?? "")}` : plural(to.size, "queue")} of Holdfast?`,
          action: "queue.import",
          target: ["queue", ...(to.size === 1 ? to : [])],
          details: { peer: peer.name, schema, queues: routes.slice(0, 100) },
        },
        options,
        () => moveAll(server, peer, schema, routes, all, options, stop.signal),
      );
      if (done === undefined) return;
      const after = (await peer.examine(server.query, schema)).queues.filter(({ name: each }) =>
        routes.some(({ from }) => from === each),
      );
      if (options.json) printJson(resultOf(peer, schema, done, after, found));
      else report(done, after, peer);
      if (options.wait !== undefined && after.some((each) => movable(each) + each.active > 0))
        process.exitCode = exitCodes.no;
    },
    how,
  );
}

/** "emails" is moved to the queue of the same name, "emails=mails" to "mails". Without any: all that have jobs. */
function routesOf(given: readonly string[] | undefined, { queues }: Found, peer: Peer): Route[] {
  const known = new Set(queues.map(({ name }) => name));
  if (given === undefined)
    return queues
      .filter((each) => movable(each) + each.active + each.tied > 0)
      .map(({ name }) => ({ from: name, to: name }));
  const routes = given.map((each): Route => {
    const at = each.lastIndexOf("=");
    return known.has(each) || at < 1
      ? { from: each, to: each }
      : { from: each.slice(0, at), to: each.slice(at + 1) };
  });
  for (const { from, to } of routes) {
    if (!known.has(from))
      throw new Failure(
        `${peer.name} has no queue ${quoted(from)}${known.size === 0 ? ": it has none." : `. It has ${listed([...known].map(quoted), 20)}.`}`,
      );
    if (to === "") throw new Failure(`--queue ${quoted(from)}=: to which one?`);
  }
  return routes;
}

/** Once; and with --wait again, until nothing of theirs is with a worker any more, or time is up. */
async function moveAll(
  server: Server,
  peer: Peer,
  schema: string,
  routes: readonly Route[],
  expected: number,
  { wait, deadline, json }: ImportOptions,
  signal: AbortSignal,
): Promise<Moved[]> {
  using bar = progress(expected, json);
  const until = performance.now() + (wait ?? 0) * 1000;
  let all: Moved[] = [];
  let before = 0;
  for (;;) {
    const some = await move(server, peer, schema, routes, {
      signal,
      deadline: deadline * 1000,
      moved: (n) => bar.at(before + n),
    });
    all = all.length === 0 ? some : all.map((each, i) => sum(each, some[i]));
    before = all.reduce((total, each) => total + totalOf(each), 0);
    if (wait === undefined || performance.now() >= until) return all;
    for (;;) {
      const left = (await peer.examine(server.query, schema)).queues.filter(({ name }) =>
        routes.some(({ from }) => from === name),
      );
      const back = left.reduce((total, each) => total + movable(each), 0);
      if (back === 0 && left.every(({ active }) => active === 0)) return all;
      if (performance.now() >= until) return all;
      await sleep(pollMs, undefined, { signal }).catch(() => signal.throwIfAborted());
      if (back > 0) break;
    }
  }
}

/** Of the last time what stayed, of all times what was moved. */
function sum(a: Moved, b: Moved | undefined): Moved {
  if (!b) return a;
  return {
    ...b,
    waiting: a.waiting + b.waiting,
    scheduled: a.scheduled + b.scheduled,
    retrying: a.retrying + b.retrying,
  };
}

function progress(total: number, json: true | undefined): { at(n: number): void } & Disposable {
  if (json || !process.stderr.isTTY || total === 0) return { at() {}, [Symbol.dispose]() {} };
  const bar = new SingleBar({
    format: "{bar}  {value} of {total} jobs",
    stream: process.stderr,
    barsize: 24,
    barCompleteChar: "█",
    barIncompleteChar: "░",
    clearOnComplete: true,
    hideCursor: true,
  });
  bar.start(total, 0);
  return {
    at: (n) => bar.update(Math.min(n, total)),
    [Symbol.dispose]: () => bar.stop(),
  };
}

function show(
  chosen: readonly Standing[],
  routes: readonly Route[],
  { schedules }: Found,
  code = false,
): void {
  if (chosen.length > 0)
    printTable(
      ["queue", "to", "waiting", "scheduled", "retrying", "active", "tied"],
      chosen.map((each, i) => [
        cell(each.name),
        cell(routes[i]?.to),
        each.waiting,
        each.scheduled,
        each.retrying,
        each.active,
        each.tied,
      ]),
      ["tied"],
    );
  for (const each of chosen)
    for (const remark of each.remarks) print(`${shown(each.name)}: ${shown(remark)}`);
  if (code && chosen.length > 0) {
    print();
    print("As queues of Holdfast:");
    for (const [i, each] of chosen.entries())
      print(`  ${shown(each.code.replace(JSON.stringify(each.name), JSON.stringify(routes[i]?.to)))}`);
  }
  if (schedules.length > 0) {
    if (code) print();
    print(
      `${plural(schedules.length, "schedule")} of theirs, not moved${code ? ". In your code:" : ": --dry-run prints them as code."}`,
    );
    for (const each of code ? schedules : [])
      for (const line of each.code.split("\n")) print(`  ${shown(line)}`);
  }
}

function planOf(found: Found, chosen: readonly Standing[], routes: readonly Route[]) {
  return {
    version: found.version,
    queues: chosen.map((each, i) => ({ ...each, to: routes[i]?.to })),
    schedules: found.schedules,
  };
}

function resultOf(
  peer: Peer,
  schema: string,
  moved: readonly Moved[],
  after: readonly Standing[],
  { version, schedules }: Found,
) {
  return {
    peer: peer.name,
    schema,
    version,
    moved: moved.reduce((total, each) => total + totalOf(each), 0),
    queues: moved,
    left: after.map(({ name, waiting, scheduled, retrying, active, tied }) => ({
      name,
      waiting,
      scheduled,
      retrying,
      active,
      tied,
    })),
    schedules,
  };
}

function report(moved: readonly Moved[], after: readonly Standing[], peer: Peer): void {
  const total = moved.reduce((all, each) => all + totalOf(each), 0);
  print(
    `${plural(total, "job")} moved${moved.length > 1 ? `: ${moved.map((each) => `${totalOf(each).toLocaleString("en")} of ${quoted(each.from)}`).join(", ")}` : ""}.`,
  );
  for (const each of moved) {
    if (each.keyTaken > 0)
      print(
        `${plural(each.keyTaken, "job")} of ${quoted(each.from)} stayed: there are jobs with these keys in ${quoted(each.to)}.`,
      );
    for (const { id, why } of each.unfit.slice(0, 10))
      print(`Job ${shown(id)} of ${quoted(each.from)} stayed: ${shown(why)}.`);
    if (each.unfit.length > 10) print(`And ${plural(each.unfit.length - 10, "more job")} like that.`);
  }
  const active = after.reduce((all, each) => all + each.active, 0);
  const left = after.reduce((all, each) => all + movable(each), 0);
  const tied = after.reduce((all, each) => all + each.tied, 0);
  if (active > 0) print(`${plural(active, "job")} with workers of ${peer.name}, which end them.`);
  if (tied > 0) print(`${plural(tied, "job")} tied to other jobs there, which its workers run.`);
  if (left > 0)
    print(
      `${plural(left, "job")} waiting there: added, given back or kept by one that runs meanwhile. Run this again, or add --wait.`,
    );
}
