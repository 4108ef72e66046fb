import { InvalidArgumentError } from "commander";

export function whole(least: number, most = Number.MAX_SAFE_INTEGER): (text: string) => number {
  return (text) => {
    const value = Number(text);
    const isWhole = /^-?\d+$/.test(text.trim());
    if (!isWhole || !Number.isSafeInteger(value) || value < least || value > most) {
      // Whoever is beyond it should know how far it goes.
      const limit = most < Number.MAX_SAFE_INTEGER || (isWhole && value > least) ? ` to ${most}` : "";
      throw new InvalidArgumentError(`It must be a whole number from ${least}${limit}.`);
    }
    return value;
  };
}

/** A whole number of milliseconds. The most is what servers and timers take. */
export function milliseconds(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === "" || !Number.isInteger(value) || value < least || value > 2 ** 31 - 1)
      throw new InvalidArgumentError(`It must be a whole number of milliseconds from ${least}.`);
    return value;
  };
}
