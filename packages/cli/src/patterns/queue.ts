import { type FailedJob, type Older, type QueueInfo, queue, queues } from "holdfast/queue";
import { Failure, exitCodes } from "../failure.ts";
import { plural, shown } from "../text.ts";
import type { Server } from "../server.ts";
import { age, note, print, printJson } from "../terminal.ts";
import { type ChangeOptions, change } from "./change.ts";
import { type PlaceOptions, onServer } from "./place.ts";
import { cell, counted, firstLine, iso, printFacts, printTable, quoted, when } from "./show.ts";

/** A queue that is not there would be made by asking for it. */
async function found({ hf }: Server, name: string): Promise<QueueInfo> {
  const [info] = await queues(hf, { names: [name] });
  if (info) return info;
  const known = (await queues(hf)).map((each) => quoted(each.name));
  throw new Failure(
    `There is no queue ${quoted(name)}${known.length === 0 ? ": there are none yet." : `. There are ${known.slice(0, 20).join(", ")}${known.length > 20 ? " …" : "."}`}`,
  );
}

const oldest = ({ oldest: ms }: QueueInfo) => (ms === undefined ? "" : age(ms));

export async function list(options: PlaceOptions): Promise<void> {
  await onServer("queue", options, async ({ hf }) => {
    const all = await queues(hf);
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
        each.workers,
        oldest(each),
        each.paused ? "paused" : "",
      ]),
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
      workers: info.workers,
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

export async function job(name: string, id: number, options: PlaceOptions): Promise<void> {
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const view = await queue(server.hf, name).inspect(id);
    if (!view) {
      process.exitCode = exitCodes.no;
      if (options.json) printJson({ job: null });
      else print(`There is no job ${id} in ${quoted(name)}: it was done or discarded, or never there.`);
      return;
    }
    if (options.json) {
      printJson({ job: { ...view, at: iso(view.at), runAt: iso(view.runAt) } });
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
    if (view.error === undefined) return;
    print();
    for (const line of view.error.split("\n")) print(shown(line));
  });
}

/** Those that were not what they were taken for are no mistake, but the answer is not a plain yes. */
function told(done: number, asked: number | undefined, words: string, json: true | undefined): void {
  if (json) printJson({ jobs: done });
  else print(`${plural(done, "job")} ${words}.`);
  if (asked === undefined || done === asked) return;
  note(`${plural(asked - done, "job")} of those that were named: not there any more, or not in that state.`);
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
    const done = await change(
      server,
      {
        question: `Retry ${which} of queue ${quoted(name)}?`,
        action: "queue.retry",
        target: ["queue", name],
        details: options.all ? { all: true } : { ids },
      },
      options,
      async () => ({ jobs: await queue(server.hf, name).retry(options.all ? undefined : ids) }),
    );
    if (done) told(done.jobs, options.all ? undefined : ids.length, "to be run again", options.json);
  });
}

export async function discard(name: string, some: readonly number[], options: ChangeOptions): Promise<void> {
  const ids = [...new Set(some)];
  await onServer("queue", options, async (server) => {
    await found(server, name);
    const done = await change(
      server,
      {
        question: `Discard ${plural(ids.length, "job")} of queue ${quoted(name)}? They cannot be had back.`,
        action: "queue.discard",
        target: ["queue", name],
        details: { ids },
      },
      options,
      async () => ({ jobs: await queue(server.hf, name).discard(ids) }),
    );
    if (done) told(done.jobs, ids.length, "discarded", options.json);
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
