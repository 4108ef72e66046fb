import { trail } from "holdfast/audit";
import {
  type FailedJob,
  type JobInfo,
  type JobState,
  type JobView,
  type Older,
  type QueueInfo,
  jobs,
  queue,
  queues,
  workers,
} from "holdfast/queue";
import { Failure, exitCodes } from "../failure.ts";
import { plural, shown } from "../text.ts";
import type { Server } from "../server.ts";
import { age, note, print, printJson } from "../terminal.ts";
import { type ChangeOptions, change, targetOf } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, counted, firstLine, iso, printFacts, printTable, quoted, when } from "./show.ts";

/** A worker that has died is none, whether or not another one has noticed. */
interface Info extends QueueInfo {
  readonly deadWorkers: number;
}

async function infos({ hf }: Server, names?: readonly string[]): Promise<Info[]> {
  const all = await queues(hf, names ? { names } : {});
  const working = await workers(hf);
  return all.map((info) => {
    const own = working.filter((each) => each.queue === info.name);
    const alive = own.filter((each) => each.alive).length;
    return { ...info, workers: alive, deadWorkers: own.length - alive };
  });
}

/** A queue that is not there would be made by asking for it. */
async function found(server: Server, name: string): Promise<Info> {
  const { hf } = server;
  const [info] = await infos(server, [name]);
  if (info) return info;
  const known = (await queues(hf)).map((each) => quoted(each.name));
  throw new Failure(
    `There is no queue ${quoted(name)}${known.length === 0 ? ": there are none yet." : `. There are ${known.slice(0, 20).join(", ")}${known.length > 20 ? " …" : "."}`}`,
  );
}

const oldest = ({ oldest: ms }: QueueInfo) => (ms === undefined ? "" : age(ms));

export async function list(options: PlaceOptions): Promise<void> {
  await onServer("queue", options, async (server) => {
    const all = await infos(server);
    if (options.json) {
      printJson({ queues: all });
      return;
    }
    if (all.length === 0) {
      print("There are no queues yet: a queue is made by its first job or worker.");
      return;
    }
    printTable(
      ["queue", "waiting", "delayed", "running", "failed", "workers", "oldest", "state"],
      all.map((each) => [
        cell(each.name),
        counted(each.waiting),
        counted(each.delayed),
        each.running,
        counted(each.failed),
        each.deadWorkers > 0 ? `${each.workers}, ${each.deadWorkers} dead` : each.workers,
        oldest(each),
        each.paused ? "paused" : "",
      ]),
      ["delayed", "oldest"],
    );
  });
}

const dated = ({ at, failedAt, ...job }: FailedJob) => ({ ...job, at: iso(at), failedAt: iso(failedAt) });

export async function show(
  name: string,
  options: PlaceOptions & { readonly limit: number; readonly after?: number },
): Promise<void> {
  await onServer("queue", options, async (server) => {
    const info = await found(server, name);
    const { limit, after } = options;
    const failed = await queue(server.hf, name).failed({ limit, ...(after !== undefined && { after }) });
    if (options.json) {
      printJson({ queue: info, failed: failed.map(dated) });
      return;
    }
    printFacts({
      queue: name,
      state: info.paused ? "paused: no worker claims anything" : "open",
      waiting: counted(info.waiting),
      delayed: counted(info.delayed),
      running: info.running,
      failed: counted(info.failed),
      workers: info.deadWorkers > 0 ? `${info.workers}, and ${info.deadWorkers} that died` : info.workers,
      oldest: info.oldest === undefined ? undefined : `waits for ${age(info.oldest)}`,
    });
    if (failed.length === 0) return;
    print();
    printTable(
      ["job", "failed at (UTC)", "attempts", "key", "error"],
      failed.map((job) => [
        job.id,
        when(job.failedAt),
        job.attempts,
        cell(job.key),
        cell(firstLine(job.error)),
      ]),
      ["key", "attempts"],
    );
    if (failed.length === limit) note(`There may be more: --after ${failed.at(-1)?.id}`);
  });
}

const states: readonly JobState[] = ["running", "waiting", "delayed", "failed"];

function doing({ state, worker }: JobInfo): string {
  return worker && !worker.alive ? `${state}, worker died` : state;
}

/** Of one state, page by page; or the first of each. */
export async function showJobs(
  name: string,
  options: PlaceOptions & { readonly state?: JobState; readonly limit: number; readonly after?: string },
): Promise<void> {
  const { state, limit, after } = options;
  if (after !== undefined && state === undefined)
    throw new Failure("--after which page? It goes with the --state of the page before.");
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const pages = [];
    for (const each of state ? [state] : states) {
      const page = await jobs(server.hf, name, { state: each, limit, ...(after !== undefined && { after }) });
      if (page) pages.push({ state: each, ...page });
    }
    const all = pages.flatMap((page) => page.jobs);
    const next = pages.filter((page) => page.next !== undefined);
    if (options.json) {
      const dates = ({ at, runAt, startedAt, ...each }: JobInfo) => ({
        ...each,
        at: iso(at),
        runAt: iso(runAt),
        startedAt: iso(startedAt),
      });
      printJson({
        queue: name,
        jobs: all.map(dates),
        next: Object.fromEntries(next.map((page) => [page.state, page.next])),
      });
      return;
    }
    if (all.length === 0) {
      print(`There are no ${state === undefined ? "" : `${state} `}jobs in ${quoted(name)}.`);
      return;
    }
    printTable(
      ["job", "state", "age", "start (UTC)", "failures", "priority", "key", "group", "worker or error"],
      all.map((each) => [
        each.id,
        doing(each),
        age(each.ageMs),
        when(each.startedAt ?? each.runAt),
        each.failures,
        each.priority,
        cell(each.key),
        cell(each.group),
        cell(each.worker?.name ?? each.error),
      ]),
      ["priority", "failures", "worker or error", "start (UTC)", "group"],
    );
    for (const page of next) note(`More that are ${page.state}: --state ${page.state} --after ${page.next}`);
  });
}

export async function job(name: string, id: number, options: PlaceOptions): Promise<void> {
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const view = await queue(server.hf, name).inspect(id);
    const before = view?.error === undefined ? await earlier(server, name, id) : undefined;
    if (!view) {
      process.exitCode = exitCodes.no;
      if (options.json) printJson({ job: null });
      else print(`There is no job ${id} in ${quoted(name)}: it was done or discarded, or never there.`);
      return;
    }
    if (options.json) {
      printJson({ job: { ...view, at: iso(view.at), runAt: iso(view.runAt), before: before ?? null } });
      return;
    }
    printFacts({
      job: id,
      queue: name,
      state: view.state,
      failures: view.failures,
      priority: view.priority,
      key: view.key,
      group: view.group,
      "enqueued at": `${when(view.at)} UTC`,
      "due at": view.runAt === undefined ? undefined : `${when(view.runAt)} UTC`,
      worker: view.worker,
      payload: JSON.stringify(view.payload),
    });
    const error = view.error ?? before?.error;
    if (error === undefined) return;
    print();
    if (before)
      print(
        `It had failed after ${plural(before.attempts, "attempt")}, and was retried at ${when(new Date(before.retriedAt))} UTC by ${shown(before.by)}:`,
      );
    for (const line of error.split("\n")) print(shown(line));
  });
}

/** Of a job, as a change by hand found it. */
interface Was {
  readonly id: number;
  readonly attempts?: number;
  readonly error?: string;
}

/** How many lines of the audit are looked through. */
const linesBack = 1000;

/** Why a job had failed that was retried by hand: the queue forgets it, the audit does not. */
async function earlier({ hf }: Server, name: string, id: number) {
  // One who may not read the audit may look at the job.
  const lines = await trail(hf, { target: targetOf(["queue", name]), limit: linesBack }).catch(() => []);
  for (const line of lines) {
    if (line.action !== "queue.retry") continue;
    const { failed } = (line.details ?? {}) as { failed?: readonly Was[] };
    const was = failed?.find((each) => each.id === id);
    if (was?.error !== undefined)
      return {
        error: was.error,
        attempts: was.attempts ?? 0,
        retriedAt: line.at.toISOString(),
        by: line.actor,
      };
  }
  return undefined;
}

/** A line of the audit is for people to read: of many jobs, of the first so many, and of a long error its beginning. */
const kept = { jobs: 1000, error: 1000 };

/** Those that are to be retried, with why they failed. */
async function failedOf({ hf }: Server, name: string, ids: readonly number[] | undefined): Promise<Was[]> {
  const it = queue(hf, name);
  const some = ids
    ? (await Promise.all(ids.slice(0, kept.jobs).map((id) => it.inspect(id)))).flatMap((view) =>
        view?.state === "failed" ? [{ id: view.id, attempts: view.failures, error: view.error ?? "" }] : [],
      )
    : await it.failed({ limit: kept.jobs });
  return some.map(({ id, attempts, error }) => ({ id, attempts, error: error.slice(0, kept.error) }));
}

/** Those that were not what they were taken for are no mistake, but the answer is not a plain yes. */
function told(done: number, asked: number | undefined, words: string, json: true | undefined): void {
  if (json) printJson({ jobs: done });
  else print(`${plural(done, "job")} ${words}.`);
  if (asked !== undefined) missed(asked - done);
}

function missed(n: number): void {
  if (n === 0) return;
  note(`${plural(n, "job")} of those that were named: not there any more, or not in that state.`);
  process.exitCode = exitCodes.no;
}

export async function retry(
  name: string,
  some: readonly number[],
  options: ChangeOptions & { readonly all?: true },
): Promise<void> {
  const ids = [...new Set(some)];
  if (ids.length > 0 === (options.all ?? false))
    throw new Failure("Retry which jobs? Name their ids, or say --all.");
  await onServer("queue", options, async (server) => {
    const { failed } = await found(server, name);
    const which = options.all ? `all failed jobs (${counted(failed)})` : plural(ids.length, "job");
    const was = await failedOf(server, name, options.all ? undefined : ids);
    const done = await change(
      server,
      {
        question: `Retry ${which} of queue ${quoted(name)}?`,
        action: "queue.retry",
        target: ["queue", name],
        details: { ...(options.all ? { all: true } : { ids }), failed: was },
      },
      options,
      async () => ({ jobs: await queue(server.hf, name).retry(options.all ? undefined : ids) }),
    );
    if (done) told(done.jobs, options.all ? undefined : ids.length, "to be run again", options.json);
  });
}

/** What is thrown away, so that it can be enqueued again. */
function remains({ id, state, failures, priority, key, group, payload, error }: JobView) {
  return { id, state, failures, priority, key, group, payload, error };
}

export async function discard(name: string, some: readonly number[], options: ChangeOptions): Promise<void> {
  const ids = [...new Set(some)];
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const it = queue(server.hf, name);
    // What is in a job never changes: what was read before is what is thrown away.
    const seen: ReturnType<typeof remains>[] = [];
    for (const id of ids) {
      const view = await it.inspect(id);
      if (view) seen.push(remains(view));
    }
    const done = await change(
      server,
      {
        question: `Discard ${plural(ids.length, "job")} of queue ${quoted(name)}? What was in them stays in the audit.`,
        action: "queue.discard",
        target: ["queue", name],
        details: { ids, found: seen },
      },
      options,
      // One by one, to know which; all of them or none.
      () =>
        server.hf.transaction(async () => {
          const gone: number[] = [];
          for (const id of ids) if ((await it.discard(id)) > 0) gone.push(id);
          return { jobs: gone.length, discarded: gone };
        }),
    );
    if (!done) return;
    const { jobs: n, discarded } = done;
    if (options.json) printJson({ jobs: n, discarded: seen.filter(({ id }) => discarded.includes(id)) });
    else print(`${plural(n, "job")} discarded.`);
    missed(ids.length - n);
  });
}

export async function prune(
  name: string,
  options: ChangeOptions & { readonly before: Older & { readonly typed: string } },
): Promise<void> {
  const { typed, ...which } = options.before;
  const long = which.before ? `before ${when(which.before)} UTC` : `more than ${typed} ago`;
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const done = await change(
      server,
      {
        question: `Forget the jobs of queue ${quoted(name)} that failed ${long}? They cannot be had back.`,
        action: "queue.prune",
        target: ["queue", name],
        details: which,
      },
      options,
      async () => ({ jobs: await queue(server.hf, name).prune(which) }),
    );
    if (done) told(done.jobs, undefined, "forgotten", options.json);
  });
}

export async function pause(name: string, paused: boolean, options: ChangeOptions): Promise<void> {
  await onServer("queue", options, async (server) => {
    const info = await found(server, name);
    const word = paused ? "paused" : "open";
    if (info.paused === paused) {
      if (options.json) printJson({ queue: name, paused, changed: false });
      else print(`Queue ${quoted(name)} is ${word} already.`);
      return;
    }
    const done = await change(
      server,
      {
        question: paused
          ? `Pause queue ${quoted(name)}? No worker will claim a job of it; what runs goes on.`
          : `Resume queue ${quoted(name)}?`,
        action: paused ? "queue.pause" : "queue.resume",
        target: ["queue", name],
      },
      options,
      async () => {
        const it = queue(server.hf, name);
        await (paused ? it.pause() : it.resume());
        return { paused };
      },
    );
    if (!done) return;
    if (options.json) printJson({ queue: name, paused, changed: true });
    else print(`Queue ${quoted(name)} is ${word}.`);
  });
}
