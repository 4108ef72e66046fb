/** The same signal; but who asks it, looks first: after a pause of the whole process code may run before timers do. */
export function watched(signal: AbortSignal, look: () => void): AbortSignal {
  return Object.defineProperties(signal, {
    aborted: {
      configurable: true,
      get() {
        look();
        return Reflect.get(AbortSignal.prototype, "aborted", signal);
      },
    },
    throwIfAborted: {
      configurable: true,
      value() {
        look();
        AbortSignal.prototype.throwIfAborted.call(signal);
      },
    },
  });
}
