/**
 * What the calling code is inside of: a transaction's body, one shard of several. It is passed on to whatever is called from
 * there, and not to what goes on in the background once it has been started there.
 */
import { AsyncLocalStorage } from "node:async_hooks";

/** Another one for each start of something in the background. */
const starts = new AsyncLocalStorage<object>();

export class Inside<T> {
  readonly #store = new AsyncLocalStorage<
    { readonly value: T; readonly since: object | undefined } | undefined
  >();

  getStore(): T | undefined {
    const found = this.#store.getStore();
    // What was entered before the start was left by it: of whatever instance, so that none has to know the others.
    return found !== undefined && found.since === starts.getStore() ? found.value : undefined;
  }

  run<R>(value: T, work: () => R): R {
    return this.#store.run({ value, since: starts.getStore() }, work);
  }

  /** The same for the rest of what calls, where nothing of ours is around it. */
  enter(value: T): void {
    this.#store.enterWith({ value, since: starts.getStore() });
  }

  /** Runs work that is meant to be outside. */
  leave<R>(work: () => R): R {
    return this.#store.run(undefined, work);
  }
}

/** Outside of everything of ours. What the caller keeps in storages of its own is passed on. */
export function apart<R>(work: () => R): R {
  return starts.run({}, work);
}
