import { UsageError } from "./errors.ts";

/**
 * The same object, until `revoke`: for a client that everybody shares, so that a body which goes on after its
 * transaction has ended does not write into somebody else's. What the methods named in `makers` return is part of it.
 */
export function revocable<T extends object>(
  target: T,
  makers: readonly string[] = [],
): { readonly proxy: T; revoke(): void } {
  let over = false;
  const view = <O extends object>(object: O): O => {
    const proxy: O = new Proxy(object, {
      get(_, name) {
        if (over)
          throw new UsageError(
            "This transaction is over: its client must not be used any more",
            "HF_TRANSACTION_OVER",
          );
        const value: unknown = Reflect.get(object, name, object);
        if (typeof value !== "function") return value;
        return (...args: unknown[]) => {
          if (over)
            throw new UsageError(
              "This transaction is over: its client must not be used any more",
              "HF_TRANSACTION_OVER",
            );
          // Methods of native objects work on the object itself only.
          const made: unknown = Reflect.apply(value as (...a: unknown[]) => unknown, object, args);
          if (made === object) return proxy;
          return makers.includes(String(name)) && typeof made === "object" && made !== null
            ? view(made)
            : made;
        };
      },
      set: (_, name, value) => Reflect.set(object, name, value, object),
    });
    return proxy;
  };
  return {
    proxy: view(target),
    revoke() {
      over = true;
    },
  };
}
