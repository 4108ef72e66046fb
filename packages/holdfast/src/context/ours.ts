import { AsyncLocalStorage } from "node:async_hooks";

/** Whether what runs is Holdfast's own: of any instance, as several may watch one client. */
const own = new AsyncLocalStorage<boolean>();

export function isOurs(): boolean {
  return own.getStore() === true;
}

export function ours<T>(work: () => T): T {
  return own.run(true, work);
}

/** The caller's own, which ours has called. */
export function notOurs<T>(work: () => T): T {
  return isOurs() ? own.run(false, work) : work();
}
