import { UsageError } from "./errors.ts";

/**
 * The same object, until `revoke`: for a client that everybody shares, so that a body which goes on after its
 * transaction has ended does not write into somebody else's.
 */
export function revocable<T extends object>(target: T): { readonly proxy: T; revoke(): void } {
  let over = false;
  const proxy = new Proxy(target, {
    get(object, name) {
      if (over)
        throw new UsageError(
          "This transaction is over: its client must not be used any more",
          "HF_TRANSACTION_OVER",
        );
      const value: unknown = Reflect.get(object, name, object);
      // Methods of native objects work on the object itself only.
      return typeof value === "function" ? (value as (...args: unknown[]) => unknown).bind(object) : value;
    },
    set: (object, name, value) => Reflect.set(object, name, value, object),
  });
  return {
    proxy,
    revoke() {
      over = true;
    },
  };
}
