/** Named messages that arrive and are waited for in any order. */
export class Inbox {
  // Only the two ends of a message know what it carries.
  readonly #messages = new Map<string, any[]>();
  readonly #waiting = new Map<string, Waiter[]>();
  #closed: Error | undefined;

  put(name: string, payload: unknown): void {
    const waiter = this.#waiting.get(name)?.shift();
    if (waiter) waiter.resolve(payload);
    else append(this.#messages, name, payload);
  }

  /** The next message of that name; without a deadline, however long it takes. */
  take<T>(name: string, deadline?: number): Promise<T> {
    const messages = this.#messages.get(name);
    if (messages && messages.length > 0) return Promise.resolve(messages.shift());
    if (this.#closed) return Promise.reject(this.#closed);
    return new Promise<T>((resolve, reject) => {
      const waiter: Waiter = {
        resolve(payload) {
          clearTimeout(timer);
          resolve(payload);
        },
        reject(error) {
          clearTimeout(timer);
          reject(error);
        },
      };
      const timer =
        deadline === undefined
          ? undefined
          : setTimeout(() => {
              const waiters = this.#waiting.get(name) ?? [];
              waiters.splice(waiters.indexOf(waiter), 1);
              reject(new Error(`No message "${name}" within ${deadline} ms`));
            }, deadline);
      append(this.#waiting, name, waiter);
    });
  }

  close(reason: Error): void {
    this.#closed ??= reason;
    for (const waiters of this.#waiting.values()) {
      for (const waiter of waiters.splice(0)) waiter.reject(this.#closed);
    }
  }
}

interface Waiter {
  resolve(payload: any): void;
  reject(error: Error): void;
}

function append<T>(lists: Map<string, T[]>, name: string, item: T): void {
  const list = lists.get(name);
  if (list) list.push(item);
  else lists.set(name, [item]);
}
