// How names and numbers are written.

export const chainText = (chain) => (chain.length ? chain.join(" › ") : "–");
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
export const ms = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(value < 10 ? 2 : 1)} ms`);
export const whole = (value) => Math.round(value).toLocaleString("en");
export const bytes = (value) =>
  value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : value >= 2 ** 20 ? `${(value / 2 ** 20).toFixed(0)} MiB` : `${(value / 1024).toFixed(0)} KiB`;
export const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString();

/** The class that colours and underlines a model's tokens; 0 is the target's. */
export const mark = (number) => `mark-${number % 7}`;
export const marksOf = (models, target) => {
  const marks = new Map([[target, mark(0)]]);
  models.filter((one) => one.name !== target).forEach((one, place) => marks.set(one.name, `mark-${1 + (place % 6)}`));
  return marks;
};
