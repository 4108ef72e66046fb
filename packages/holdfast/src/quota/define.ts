/** Limits that are exact: `quota(hf, { name: "uploads", limit: 100, per: "day" })`. */
import { instancesOf } from "../shards/shards.ts";
import type { Transactor } from "../transaction/transaction.ts";
import { Quota } from "./quota.ts";
import { QuotaSet } from "./set.ts";
import type { QuotaOptions } from "./types.ts";

/** `hf`: an instance, or `sharded(databases, …)`: a subject's calls go to the shard of `key(name, subject)`. */
export function quota<Native>(hf: Transactor<Native>, options: QuotaOptions): Quota {
  return new Quota(instancesOf(hf, "quota"), options);
}

/** Several limits at once: all of them or none. */
quota.all = (quotas: readonly Quota[]): QuotaSet => new QuotaSet(quotas);
