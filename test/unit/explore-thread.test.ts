/** A thread of an actor goes on when it has the turn, whatever else wakes it. */
import { setTimeout as sleep } from "node:timers/promises";
import { Worker } from "node:worker_threads";
import { expect, test } from "vitest";
import {
  type Given,
  type Said,
  flag,
  flags,
  verdict,
} from "../../packages/holdfast/src/testing/explore/verdict.ts";

const source = (path: string) =>
  JSON.stringify(new URL(`../../packages/holdfast/src/${path}`, import.meta.url).href);

test("who is woken late for the last turn does not take the next one", async () => {
  const shared = new Int32Array(new SharedArrayBuffer(flags * Int32Array.BYTES_PER_ELEMENT));
  shared[flag.holding] = 1;
  const actor = `data:text/javascript,${encodeURIComponent(`
    import { DatabaseSync } from "node:sqlite";
    import { tmpdir } from "node:os";
    import { join } from "node:path";
    export function ask() {
      const db = new DatabaseSync(join(tmpdir(), "holdfast-thread-" + process.pid + ".db"));
      try { return Object.values(db.prepare("SELECT 7 AS n").get())[0]; } finally { db.close(); }
    }`)}`;
  const program = `
    import { serve } from ${source("testing/explore/thread.ts")};
    import { hookStatements } from ${source("engines/sqlite/statement-hook.ts")};
    await serve([hookStatements], () => import(${JSON.stringify(actor)}));`;
  const given: Given = { name: "ask", args: [], flags: shared };
  const worker = new Worker(new URL(`data:text/javascript,${encodeURIComponent(program)}`), {
    workerData: given,
    execArgv: ["--conditions=holdfast-source"],
  });
  const said: Said[] = [];
  const heard = Promise.withResolvers<void>();
  const done = Promise.withResolvers<void>();
  worker.on("message", (each: Said) => {
    said.push(each);
    // oxlint-disable-next-line unicorn/require-post-message-target-origin -- it is a thread's port, not a window's.
    if (each.kind === "ready") worker.postMessage("run");
    if (each.kind === "held") heard.resolve();
    if (each.kind === "done") done.resolve();
  });
  worker.on("error", (error) => {
    heard.reject(error);
    done.reject(error);
  });
  try {
    await heard.promise;
    while (Atomics.notify(shared, flag.verdict) === 0) await sleep(1);
    await sleep(100);
    expect(said.map(({ kind }) => kind)).toEqual(["ready", "held"]);
    Atomics.store(shared, flag.verdict, verdict.go);
    Atomics.notify(shared, flag.verdict);
    await done.promise;
    expect(said.at(-1)).toMatchObject({ kind: "done", value: 7 });
  } finally {
    await worker.terminate();
  }
});
