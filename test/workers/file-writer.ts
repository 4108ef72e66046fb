/** A process that writes to a file, with keys or without Holdfast, and stays inside until it is told to go on. */
import { type Holdfast, holdfast, key, once } from "holdfast";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface FileWriterArg {
  readonly backend: string;
  readonly url: string;
  /** `raw`: without Holdfast. `blocked`: with a key, and the process can do nothing else meanwhile. */
  readonly how: "lock" | "later" | "join" | "once" | "raw" | "blocked";
  readonly key: string;
}

export default async function fileWriter(
  { backend, url, how, key: name }: FileWriterArg,
  context: WorkerContext,
): Promise<void> {
  const site = await backendNamed(backend).open(url);
  const hf: Holdfast<unknown> = holdfast(site.database);
  const lock = key(name);
  const inside = async () => {
    context.send("inside");
    await context.receive("go on");
  };
  const deadline = 120_000;
  const ways: Record<typeof how, () => Promise<unknown>> = {
    lock: () => hf.transaction({ lock, deadline }, inside),
    later: () =>
      hf.transaction({ deadline }, async (tx) => {
        await tx.lock(lock);
        await inside();
      }),
    join: () =>
      site.ownTransaction(async (native) => {
        await hf.join(native).lock(lock);
        await inside();
      }),
    once: () => once(hf, name, inside, { deadline }),
    raw: () => site.ownTransaction(inside),
    blocked: () =>
      hf.transaction({ lock, deadline }, async () => {
        context.send("inside");
        // The message needs the process for a moment.
        await new Promise((resolve) => setTimeout(resolve, 10));
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0);
      }),
  };
  await ways[how]();
  await hf.close();
  await site.close();
}
