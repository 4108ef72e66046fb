/** Patterns on several databases: which of them a call belongs on, found by a key, as locks are. */
import type { Connection } from "../seam/database.ts";
import { ShardError, UnsupportedError, UsageError } from "../seam/errors.ts";
import { type Key, type KeyPart, key } from "../seam/key.ts";
import { type InstanceContext, contextOf, rememberSeveral } from "../transaction/scope.ts";

/** What `sharded(…)` is to patterns. */
export interface Shards {
  /** The instance that a key is routed to. */
  at(key: Key): object;
  /** All of them. Throws if they are not known. */
  all(): readonly object[];
  /** For people. */
  name(instance: object): string;
  show(name: string): string;
  /** Something may still be where another map had it before. */
  unsettled(): boolean;
  /** The number of the map. */
  epoch(): number;
}

const known = new WeakMap<object, Shards>();

export function rememberShards(instance: object, shards: Shards): void {
  known.set(instance, shards);
  rememberSeveral(instance);
}

function shardsOf(hf: unknown): Shards | undefined {
  return typeof hf === "object" && hf !== null ? known.get(hf) : undefined;
}

const families = new WeakMap<object, object>();

/** Remembers what `sharded(…)` returned for the instance of one of its shards. */
export function rememberFamily(instance: object, shards: object): void {
  families.set(instance, shards);
}

/** What `sharded(…)` returned: `hf` itself, or the one that this instance is a shard of. */
function familyOf(hf: unknown): object | undefined {
  return typeof hf === "object" && hf !== null ? (known.has(hf) ? hf : families.get(hf)) : undefined;
}

/** What a pattern's calls are routed by: as `key(…)`, whose first part is the pattern's own name. */
export type Address = readonly [name: string, ...parts: KeyPart[]];

/** The instances that a pattern's calls go to: the one that it was given, or one of several by what a call is about. */
export class Instances {
  readonly #shards: Shards | undefined;
  readonly #only: object | undefined;
  /** What `sharded(…)` returned, also if the pattern was given one instance of it. */
  readonly family: object | undefined;
  readonly #guard: InstanceContext<unknown, Connection>["guard"];

  constructor(hf: unknown, call: string) {
    this.#shards = shardsOf(hf);
    this.family = familyOf(hf);
    if (this.#shards) {
      // Who cannot name them all has nothing written down about them either.
      for (const instance of this.#shards.all())
        if (!contextOf(instance, call).database.engine.agreements)
          throw new UnsupportedError(
            `${call}: quotas, stock and queues are not kept on several databases here, as it cannot be written down in each which one it is: a process ` +
              "with another list would grant the same thing twice. Pass one instance; or decide by yourself which, and make one of each: quota(instances[n], …)",
          );
      return;
    }
    const context = contextOf(hf, call);
    this.#only = hf as object;
    this.#guard = context.guard?.bind(context);
  }

  /** Whether there is more than one. */
  get sharded(): boolean {
    return this.#shards !== undefined;
  }

  get unsettled(): boolean {
    return isUnsettled(this.family);
  }

  get epoch(): number {
    return this.#shards?.epoch() ?? 0;
  }

  get all(): readonly object[] {
    return this.#shards?.all() ?? [this.#only as object];
  }

  /** Throws where it belongs on another shard than the one that was given. */
  at(...address: Address): object {
    if (this.#shards) return this.#shards.at(keyOf(address));
    this.#guard?.([{ key: keyOf(address), mode: "exclusive" }]);
    return this.#only as object;
  }

  /** Of what is decided together: the one instance that all of them belong on. `at`: where each is, if not where it is routed to. */
  together(
    call: string,
    addresses: readonly Address[],
    at: (address: Address) => object = (address) => this.at(...address),
  ): object {
    if (!this.#shards && !this.#guard) return this.#only as object;
    const found = addresses.map((address) => ({ address, instance: at(address) }));
    const [first] = found;
    const other = found.find(({ instance }) => instance !== first?.instance);
    if (first && other)
      throw new ShardError(
        `${call}: ${[first, other].map((each) => this.#words(each)).join(", and ")}: what is decided together must be in one place.`,
      );
    return (first as { instance: object }).instance;
  }

  /** As errors show a name. */
  show(name: string): string {
    return this.#shards?.show(name) ?? name;
  }

  /** Of calls that do not say what they are about, where there is a choice. */
  only(why: string): object {
    if (this.#only) return this.#only;
    throw new UsageError(why);
  }

  #words({ address, instance }: { readonly address: Address; readonly instance: object }): string {
    const shards = this.#shards as Shards;
    return `${shards.show(keyOf(address).name)} is on ${shards.name(instance)}`;
  }
}

function keyOf([name, ...parts]: Address): Key {
  return key(name, ...parts);
}

/** Where there are several: something may still be where another map had it. */
export function isUnsettled(hf: unknown): boolean {
  return shardsOf(familyOf(hf))?.unsettled() ?? false;
}

/** Where there are several, and another map may have had it elsewhere: all but this one. */
export function othersThan(instance: object): readonly object[] {
  const shards = shardsOf(familyOf(instance));
  return shards?.unsettled() ? shards.all().filter((each) => each !== instance) : [];
}

/** Where there are several: the one of an id. */
export function instanceFor<T extends object>(hf: T, id: () => Key): T {
  const shards = shardsOf(hf);
  return shards ? (shards.at(id()) as T) : hf;
}

const instances = new WeakMap<object, Instances>();

/** Of one `hf` there is one, whoever asks. */
export function instancesOf(hf: unknown, call: string): Instances {
  const found = typeof hf === "object" && hf !== null ? instances.get(hf) : undefined;
  if (found) return found;
  const made = new Instances(hf, call);
  instances.set(hf as object, made);
  return made;
}
