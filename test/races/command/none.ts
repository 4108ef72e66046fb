/** For `holdfast race`: nothing in here is a scenario. */
export const limit = 100;
export const actors = { A: () => Promise.resolve() };
export const add = (a: number, b: number) => a + b;
export class Upload {
  bytes = 60;
}
