import { InvalidArgumentError } from "commander";

export function whole(least: number, most = Number.MAX_SAFE_INTEGER): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (!/^-?\d+$/.test(text.trim()) || !Number.isSafeInteger(value) || value < least || value > most)
      throw new InvalidArgumentError(`It must be a whole number from ${least} to ${most}.`);
    return value;
  };
}

/** A whole number of milliseconds. The most is what servers and timers take, and what the library does. */
export function milliseconds(least: number, most = 2 ** 31 - 1 - 60_000): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === "" || !Number.isInteger(value) || value < least || value > most)
      throw new InvalidArgumentError(`It must be a whole number of milliseconds from ${least} to ${most}.`);
    return value;
  };
}
