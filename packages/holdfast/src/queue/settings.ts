/** What a queue is told to be, checked. */
import { UsageError } from "../seam/errors.ts";
import { checkNames } from "../input/options.ts";
import { milliseconds } from "../waiting/wait.ts";
import type { QueueSettings } from "./store.ts";
import type { QueueOptions } from "./types.ts";

const queueOptions = new Set(["schema", "retries", "backoff", "concurrency", "groups"]);

/** `sharded`: it is in several databases. */
export function settingsOf(options: QueueOptions<unknown, unknown>, sharded: boolean): QueueSettings {
  checkNames("queue", options, queueOptions);
  const { retries = 10, groups = {}, concurrency } = options;
  checkNames("queue: groups", groups, new Set(["concurrency", "rate", "serial"]));
  const { rate, serial = false } = groups;
  if (!Number.isSafeInteger(retries) || retries < 0 || retries > 30_000)
    throw new UsageError("queue: retries must be a whole number from 0 to 30,000");
  const groupMost = serial ? 1 : groups.concurrency;
  for (const [what, value] of [
    ["concurrency", concurrency],
    ["groups.concurrency", groups.concurrency],
    ["groups.rate.limit", rate?.limit],
  ] as const)
    if (value !== undefined && (!Number.isSafeInteger(value) || value < 1))
      throw new UsageError(`queue: ${what} must be a whole number from 1`);
  if (serial && groups.concurrency !== undefined && groups.concurrency !== 1)
    throw new UsageError("queue: groups that are serial run one at a time: leave groups.concurrency out");
  if (sharded && concurrency !== undefined)
    throw new UsageError(
      "queue: concurrency is counted in one database, and this queue is in several: leave it out, and limit groups (groups.concurrency)",
    );
  return {
    attempts: retries + 1,
    most: concurrency,
    groupMost,
    groupRate: rate?.limit,
    groupPer: rate && milliseconds(rate.perMs, "queue: groups.rate.perMs", 1),
    ordered: serial,
  };
}
