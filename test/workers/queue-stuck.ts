/** One process with a job that never ends, and that nobody would give up for an hour by its signs of life. */
import { holdfast } from "holdfast";
import { queue } from "holdfast/queue";
import { backendNamed } from "../backends.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface StuckArg {
  readonly backend: string;
  readonly url: string;
  readonly queue: string;
}

export const hourMs = 3_600_000;

export default async function stuck(arg: StuckArg, { send }: WorkerContext): Promise<void> {
  const { database } = await backendNamed(arg.backend).open(arg.url);
  queue<number>(holdfast(database), arg.queue).work(
    () => {
      send("begun");
      return new Promise<void>(() => {});
    },
    { ttlMs: hourMs },
  );
  await new Promise<void>(() => {});
}
