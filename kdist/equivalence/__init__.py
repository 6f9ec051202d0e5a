"""What Keras promises on one device, as a table to try on several: does each feature stay the same?

    from kdist.equivalence import features, trial

    feature = features.FEATURES["clipnorm"]
    reference = trial.run(feature, keras.Model)                   # one device, no strategy
    outcome = trial.run(feature, kdist.Model, strategy)           # the same global batches
    print(feature.judge(outcome, reference))                      # works | wrong by 0.05

`feature` says what a feature is, `trial` trains it, `features` lists all of them. The modules named
after a theme hold the definitions, `cells` and `table` are what `scripts/compare.py` is made of.
"""
