import { placeOf, send } from "../batch/calls.ts";
import { checkTexts } from "../input/values.ts";
import { merged } from "../shards/merged.ts";
import { checkNames } from "../input/options.ts";
import { instancesOf } from "../shards/shards.ts";
import { queueBatcherOf } from "./batcher.ts";
import type { QueueCounts, QueueInfo } from "./store.ts";

/** All queues of this database, or those of these names that are there, by name. Nothing is made by asking. */
export async function queues(
  hf: object,
  options: { readonly names?: readonly string[] } = {},
): Promise<readonly QueueInfo[]> {
  checkNames("queues", options, new Set(["names"]));
  const { names } = options;
  checkTexts("queues", "names", names);
  const found = await Promise.all(
    instancesOf(hf, "queues").all.map((instance) => {
      const { context, store } = queueBatcherOf(instance);
      const place = placeOf(context, undefined, "queues");
      return send(context, place, { names: ["queues"] }, (connection) =>
        store.lists.queues(connection, names),
      );
    }),
  );
  return merged(
    found,
    ({ name }) => name,
    (a, b) => ({ name: a.name, ...sumOfCounts(a, b) }),
  );
}

/** Of a queue that is not there yet. */
export const noJobs: QueueCounts = {
  waiting: 0,
  delayed: 0,
  running: 0,
  failed: 0,
  workers: 0,
  paused: false,
  oldest: undefined,
};

export function sumOfCounts(a: QueueCounts, b: QueueCounts): QueueCounts {
  const oldest = [a.oldest, b.oldest].filter((each) => each !== undefined);
  return {
    waiting: a.waiting + b.waiting,
    delayed: a.delayed + b.delayed,
    running: a.running + b.running,
    failed: a.failed + b.failed,
    workers: a.workers + b.workers,
    // Somewhere jobs wait that nobody takes.
    paused: a.paused || b.paused,
    oldest: oldest.length === 0 ? undefined : Math.max(...oldest),
  };
}
