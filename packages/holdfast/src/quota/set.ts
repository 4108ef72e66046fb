/** Several limits at once: `quota.all([perUser, perOrganisation])`. */
import { randomUUID } from "node:crypto";
import { checkNames } from "../input/options.ts";
import { UsageError } from "../seam/errors.ts";
import { type UsePart, quotaBatcherOf } from "./batcher.ts";
import { entryOptions } from "./checks.ts";
import { QuotaExceededError } from "./errors.ts";
import { homesOf } from "./homes.ts";
import { Quota } from "./quota.ts";
import type { UseVerdict } from "./store.ts";
import type { Denied, EntryOptions, Granted, Subject } from "./types.ts";
import { useAnswer, usePart } from "./use.ts";

/** Several limits that one call must fit into. */
export class QuotaSet {
  readonly #quotas: readonly Quota[];

  constructor(quotas: readonly Quota[]) {
    if (!Array.isArray(quotas) || quotas.length === 0 || !quotas.every((each) => each instanceof Quota))
      throw new UsageError("quota.all([…]): a list of quotas");
    const [first] = quotas;
    if (quotas.some(({ instances }) => instances !== first?.instances))
      throw new UsageError("quota.all([…]): all of them on the same instance of Holdfast");
    this.#quotas = quotas;
  }

  /** @internal */
  get quotas(): readonly Quota[] {
    return this.#quotas;
  }

  /** Uses of all of them, or throws the `QuotaExceededError` of the one that refused. */
  async consume(
    subjects: Subject | readonly Subject[],
    amount: number | readonly number[] = 1,
    options: EntryOptions = {},
  ): Promise<readonly Granted[]> {
    const answer = await this.tryConsume(subjects, amount, options);
    if (answer.granted) return answer.all;
    throw new QuotaExceededError(answer.denied);
  }

  /** `subjects`: one for all, or one for each. If not granted, `denied` is the one of `all` that refused. */
  async tryConsume(
    subjects: Subject | readonly Subject[],
    amount: number | readonly number[] = 1,
    options: EntryOptions = {},
  ): Promise<
    | { readonly granted: true; readonly all: readonly Granted[] }
    | { readonly granted: false; readonly denied: Denied; readonly all: readonly Denied[] }
  > {
    checkNames("consume", options, entryOptions);
    const each = <T>(value: T | readonly T[], i: number): T => (Array.isArray(value) ? value[i] : value) as T;
    for (const value of [subjects, amount])
      if (Array.isArray(value) && value.length !== this.#quotas.length)
        throw new UsageError(`quota.all: ${value.length} values for ${this.#quotas.length} quotas`);
    const id = options.id === undefined ? randomUUID() : options.id;
    const parts = await Promise.all(
      this.#quotas.map(async (one, i) =>
        usePart(
          one.terms,
          each<Subject>(subjects, i),
          each<number>(amount, i),
          { ...options, id },
          undefined,
        ),
      ),
    );
    if (new Set(parts.map(({ quota: { name }, subject }) => `${name}\0${subject}`)).size < parts.length)
      throw new UsageError("quota.all: two of these are the same quota of the same subject");
    const named = parts.map((part) => ({ ...part, named: options.id !== undefined }));
    const [{ instances }] = this.#quotas as [Quota];
    const buckets = named.map(({ quota: { name }, subject }) => ({ quota: name, subject }));
    const verdicts = await homesOf(instances).run("quota.all", buckets, options, (instance) =>
      quotaBatcherOf(instance).consume(named, options),
    );
    const answers = this.#quotas.map((one, i) =>
      useAnswer(one.terms, named[i] as UsePart, verdicts[i] as UseVerdict),
    );
    const refused = verdicts.findIndex(({ kind, retry }) => kind === "refused" && retry !== undefined);
    const denied = answers[refused];
    if (denied && !denied.granted) return { granted: false, denied, all: answers as Denied[] };
    return { granted: true, all: answers as Granted[] };
  }
}
